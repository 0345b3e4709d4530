package main

import (
	"errors"
	"log"
	"os"
	"time"
)

// appended appends 4 KiB and calls fsync, again and again for a second, and returns how
// often it did so. The file is new, and removed at the end.
func appended(name string) int {
	f, err := os.Create(name)
	if err != nil {
		log.Fatal(err)
	}
	block := make([]byte, 4<<10)
	for i := range block {
		block[i] = byte(i)
	}
	n := 0
	for start := time.Now(); time.Since(start) < time.Second; n++ {
		_, err := f.Write(block)
		if err := errors.Join(err, f.Sync()); err != nil {
			log.Fatal(err)
		}
	}
	if err := errors.Join(f.Close(), os.Remove(name)); err != nil {
		log.Fatal(err)
	}
	return n
}
