// Command sandboxctl is the command line of sandboxd. Its commands and flags
// are named as docker's where they do the same. It talks to the daemon through
// pkg/client only, so any client can do what it does.
//
// The answer goes to standard output, everything else to standard error. run
// and exec end with the status of the command in the sandbox, everything else
// with 0 or 125 (it failed). 124 is a timeout, 126 and 127 a command that cannot
// be run, 137 one that was killed.
package main

import (
	"os"

	"github.com/sandboxd/sandboxd/internal/cli"
	"github.com/sandboxd/sandboxd/internal/release"
)

func main() { os.Exit(cli.Run(release.Version(), os.Args[1:])) }
