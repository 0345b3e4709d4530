package code

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sandboxd/sandboxd/internal/cli/command"
	"github.com/sandboxd/sandboxd/internal/cli/foreground"
	"github.com/sandboxd/sandboxd/internal/cli/text"
	"github.com/sandboxd/sandboxd/pkg/agent"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
)

func newEval(p *command.Program) *cobra.Command {
	var (
		o       command.Output
		code    client.Code
		file    string
		figures string
	)
	cmd := &cobra.Command{
		Use:   "eval [flags] SANDBOX [CODE]",
		Short: "Run code in a sandbox, in an interpreter that keeps its state",
		Long: `Run code in an interpreter of a sandbox, and print its output and the value of its
last expression. The interpreter (context) keeps definitions for the next eval. Without
--context, code runs in the context that the sandbox keeps for the language. Without
CODE, eval reads the code from standard input or, with -f, from a file.

With -o json each value is one line: an object with a key for each MIME type.

If the code fails, the exit status is 1 and the error goes to standard error. Ctrl-C
interrupts the code; the context keeps running.`,
		Example: `  sandboxctl eval lab 'x = 6 * 7'
  sandboxctl eval lab 'print("remembered"); x'
  sandboxctl eval -l javascript lab 'await Promise.resolve([1, 2].map(n => n * n))'
  sandboxctl eval --figures . -f plot.py lab`,
		Args: cobra.RangeArgs(1, 2),
	}
	cmd.RunE = p.Run(func(_ context.Context, cl *client.Client, args []string) error {
		if code.Context != "" && !cmd.Flags().Changed("language") {
			code.Language = "" // the context has one
		}
		var err error
		if code.Text, err = codeOf(args[1:], file); err != nil {
			return err
		}
		return evaluate(cl, args[0], code, shower(o.Format == command.JSON, figures))
	})
	o.Flags(cmd, false)
	languageFlag(cmd, &code.Language, "python", "python, javascript, typescript, java, go or bash")
	cmd.Flags().StringVarP(&code.Context, "context", "c", "", "id of the context to run in; see sandboxctl code context")
	cmd.Flags().StringVarP(&file, "file", "f", "", "file with the code; - is standard input")
	cmd.Flags().StringVar(&figures, "figures", "", "directory in which to save figures, as figure-1.png")
	return cmd
}

// maxCode bounds the code that is read, in bytes; the agent takes less.
const maxCode = 64 << 20

// codeOf is the code that was given, or read.
func codeOf(args []string, file string) (string, error) {
	var in io.Reader = os.Stdin
	switch {
	case len(args) > 0 && file != "":
		return "", errs.New(errs.Invalid, "CODE and --file exclude each other")
	case len(args) > 0:
		return args[0], nil
	case file != "" && file != "-":
		f, err := os.Open(file)
		if err != nil {
			return "", errs.Wrap(err, errs.Invalid, "read the code: %s", err)
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, maxCode))
	if err != nil {
		return "", errs.Wrap(err, errs.Invalid, "read the code: %s", err)
	}
	return string(b), nil
}

// evaluate runs code to its end.
func evaluate(cl *client.Client, sandbox string, code client.Code, show func(map[string]string) error) error {
	sig := foreground.Catch()
	defer sig.Stop()
	run, err := cl.Interpreters(sandbox).Run(sig.Context, code)
	if err != nil {
		if sig.Context.Err() != nil {
			return command.Status{Code: command.ExitInterrupted}
		}
		return busy(err, sandbox, code)
	}
	sig.To(run)
	err = run.Wait(os.Stdout, os.Stderr, show)
	failed, isFailed := errors.AsType[*client.CodeError](err)
	switch {
	case err == nil:
		return nil
	case sig.Context.Err() != nil:
		return command.Status{Code: command.ExitInterrupted}
	case isFailed:
		trace := strings.Join(failed.Traceback, "\n")
		if trace == "" {
			trace = failed.Error()
		}
		fmt.Fprintln(os.Stderr, trace) // colours and all, as the interpreter has it
		return command.Status{Code: 1}
	case errors.Is(err, client.ErrLost):
		return foreground.WhyLost(cl, sandbox, err,
			"was the daemon restarted? The code keeps running without this client, and its context can be used again")
	case errors.Is(err, syscall.EPIPE):
		return command.Status{Code: command.ExitNoReader} // as shells report a writer whose reader left
	}
	return err
}

// busy says in words of sandboxctl that the interpreter runs other code: the agent names
// routes. Another err is returned as it is.
func busy(err error, sandbox string, code client.Code) error {
	e, ok := errors.AsType[*errs.Error](err)
	if !ok || !strings.HasPrefix(e.Text, agent.ContextBusy) {
		return err
	}
	language := ""
	if code.Language != "" {
		language = " -l " + code.Language
	}
	return errs.Wrap(err, errs.WrongState, "the interpreter runs other code: wait until that ends, interrupt it (Ctrl-C in the eval that "+
		"started it), or make another interpreter with `sandboxctl code context create%s %s` and name it with --context", language, sandbox)
}

// shower prints the values that code shows: as JSON by MIME type, or as text,
// and keeps those that are figures.
func shower(asJSON bool, dir string) func(map[string]string) error {
	n := 0
	return func(formats map[string]string) error {
		kept := ""
		if dir != "" {
			for _, typ := range slices.Sorted(maps.Keys(formats)) {
				ext, isFigure := figureType[typ]
				if !isFigure {
					continue
				}
				if kept == "" {
					n++
				}
				kept = filepath.Join(dir, fmt.Sprintf("figure-%d%s", n, ext))
				if err := keepFigure(kept, typ, formats[typ]); err != nil {
					return err
				}
			}
		}
		switch plain := formats["text/plain"]; {
		case asJSON:
			return text.JSONLine(os.Stdout, formats)
		case kept != "":
			_, err := fmt.Println(kept)
			return err
		case plain != "":
			_, err := fmt.Println(plain)
			return err
		}
		return nil
	}
}

// figureType is how a file with a figure of a MIME type is named.
var figureType = map[string]string{"image/png": ".png", "image/jpeg": ".jpg", "image/svg+xml": ".svg"}

// keepFigure writes a figure to a file. All types except SVG come as base64.
func keepFigure(name, typ, data string) error {
	b := []byte(data)
	if typ != "image/svg+xml" {
		var err error
		if b, err = base64.StdEncoding.DecodeString(data); err != nil {
			return errs.Wrap(err, errs.Internal, "the code showed a figure of type %s that is not base64", typ)
		}
	}
	write := func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	}
	if err := command.WriteFile(name, 0o644, write); err != nil {
		return errs.Wrap(err, errs.Invalid, "save a figure: %s", err)
	}
	return nil
}
