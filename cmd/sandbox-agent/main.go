// Command sandbox-agent is PID 1 of a sandbox. It reads its bootstrap line from
// standard input; see pkg/agent for what it speaks and pkg/agent/server for
// what it does.
package main

import (
	"flag"
	"os"

	"github.com/sandboxd/sandboxd/pkg/agent/interpreter"
	"github.com/sandboxd/sandboxd/pkg/agent/server"
)

func main() {
	interpreter.Drive(os.Args)
	var o server.Options
	flag.StringVar(&o.Listen, "listen", "", "address to listen on, for tests")
	flag.StringVar(&o.StateDir, "state-dir", "", "directory of the agent's own files, for tests")
	flag.StringVar(&o.Root, "root", "", "root of the guest's file system, for tests")
	flag.Parse()
	os.Exit(server.Main(o))
}
