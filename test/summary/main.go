// Summary reads `go test -json` and says what a person wants to know: which
// packages ran, what failed and why, and how many tests that were. A skipped
// test is a failure: a prerequisite was missing.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

func main() {
	var passed, failed, skipped int
	output := map[string][]string{}
	bad := false
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 16<<20)
	for in.Scan() {
		var e event
		if json.Unmarshal(in.Bytes(), &e) != nil {
			fmt.Println(in.Text()) // the go command's own words
			continue
		}
		key := e.Package + " " + e.Test
		switch e.Action {
		case "output", "build-output":
			output[key] = append(output[key], e.Output)
		case "pass", "fail", "skip":
			if e.Test == "" {
				if e.Action == "fail" {
					bad = true
					fmt.Print(strings.Join(output[key], ""))
				}
				if e.Action != "skip" {
					fmt.Printf("%-4s %s %.1fs\n", e.Action, e.Package, e.Elapsed)
				}
				break
			}
			switch e.Action {
			case "pass":
				passed++
			case "fail":
				failed++
			case "skip":
				skipped++
			}
			if e.Action != "pass" {
				fmt.Printf("--- %s %s\n%s", e.Action, key, strings.Join(output[key], ""))
			}
			delete(output, key)
		}
	}
	if err := in.Err(); err != nil {
		fmt.Fprintln(os.Stderr, "read test events:", err)
		bad = true
	}
	for key, lines := range output { // tests that never ended
		if !strings.HasSuffix(key, " ") && bad {
			fmt.Printf("--- unfinished %s\n%s", key, strings.Join(lines, ""))
		}
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if bad || failed+skipped > 0 || passed == 0 {
		os.Exit(1)
	}
}
