package oci

import (
	"encoding/json"
	"fmt"
	"os"
)

// MainPID reads a process ID from the JSON file in which a runtime keeps its state of a
// sandbox. path lists the keys that lead to it.
func MainPID(file string, path ...string) (pid int, err error) {
	b, err := os.ReadFile(file)
	for _, key := range path {
		if err != nil {
			break
		}
		var at map[string]json.RawMessage
		err = json.Unmarshal(b, &at)
		b = at[key]
	}
	if err == nil {
		err = json.Unmarshal(b, &pid)
	}
	if err == nil && pid <= 0 {
		err = fmt.Errorf("%d is not a process id", pid)
	}
	if err != nil {
		return 0, fmt.Errorf("read a process id from %s: %w", file, err)
	}
	return pid, nil
}
