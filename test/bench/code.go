package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
)

// codeImage has all languages.
const codeImage = "code-interpreter"

// codeSandbox makes a sandbox in which code can run.
func (b *bench) codeSandbox(ctx context.Context, rt string) (wire.Sandbox, error) {
	if err := b.ensureImage(ctx, codeImage); err != nil {
		return wire.Sandbox{}, err
	}
	r := request(rt)
	r.Image.URI = codeImage
	return b.createOf(ctx, r)
}

// codeCell: 1+1 in an existing context, from the request to the end of the call.
func codeCell(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.codeSandbox(ctx, rt)
		if err != nil {
			return err
		}
		for _, language := range []string{"python", "javascript"} {
			if err := b.cells(ctx, rt, sb.ID, language); err != nil {
				return errors.Join(err, b.drop(ctx, sb.ID))
			}
		}
		if err := b.drop(ctx, sb.ID); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) cells(ctx context.Context, rt, id, language string) error {
	c, err := b.cl.Interpreters(id).Create(ctx, language, "")
	if err != nil {
		return err
	}
	cell := func() (float64, error) {
		value := ""
		start := time.Now()
		e, err := b.cl.Interpreters(id).Run(ctx, client.Code{Text: "1+1", Context: c.ID})
		if err != nil {
			return 0, err
		}
		err = e.Wait(io.Discard, io.Discard, func(formats map[string]string) error {
			value = formats["text/plain"]
			return nil
		})
		took := ms(time.Since(start))
		if err == nil && value != "2" {
			err = fmt.Errorf("1+1 is %q in %s", value, language)
		}
		return took, err
	}
	command := func() (float64, error) {
		start := time.Now()
		_, err := b.exec(ctx, id, "true")
		return ms(time.Since(start)), err
	}
	a, t, err := turns(b.times(200, 20), 10, cell, command)
	if err != nil {
		return err
	}
	b.add(row("code_cell_warm_"+language, rt, "ms", a, "the command true in the same sandbox", t, goal{maxP50: pick(rt, 3.0, 6.0)}))
	return nil
}

// codeContext: the time until a new context accepts code, against the time of the bare
// program until its end, in the same sandbox and through the same API.
func codeContext(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.codeSandbox(ctx, rt)
		if err != nil {
			return err
		}
		for _, l := range []struct {
			language string
			argv     []string
		}{
			{"python", []string{"python3", "-c", "pass"}},
			{"javascript", []string{"node", "-e", "0"}},
			{"bash", []string{"bash", "-c", "true"}},
		} {
			ours := func() (float64, error) {
				start := time.Now()
				c, err := b.cl.Interpreters(sb.ID).Create(ctx, l.language, "")
				took := ms(time.Since(start))
				if err != nil {
					return 0, err
				}
				return took, b.cl.Interpreters(sb.ID).Remove(ctx, c.ID)
			}
			theirs := func() (float64, error) {
				start := time.Now()
				_, err := b.exec(ctx, sb.ID, l.argv...)
				return ms(time.Since(start)), err
			}
			a, t, err := turns(b.times(40, 4), 3, ours, theirs)
			if err != nil {
				return errors.Join(err, b.drop(ctx, sb.ID))
			}
			b.add(row("code_context_new_"+l.language, rt, "ms", a, strings.Join(l.argv, " "), t, goal{maxRatio: 1.3}))
		}
		if err := b.drop(ctx, sb.ID); err != nil {
			return err
		}
	}
	return nil
}

// codeGo: a Go program that has run before, and the same program with another constant,
// against the go command that runs such a program.
func codeGo(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		sb, err := b.codeSandbox(ctx, rt)
		if err != nil {
			return err
		}
		if err := b.goPrograms(ctx, rt, sb.ID); err != nil {
			return errors.Join(err, b.drop(ctx, sb.ID))
		}
		if err := b.drop(ctx, sb.ID); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) goPrograms(ctx context.Context, rt, id string) error {
	c, err := b.cl.Interpreters(id).Create(ctx, "go", "")
	if err != nil {
		return err
	}
	nth := 0
	source := func() string {
		return fmt.Sprintf("package main\n\nimport \"fmt\"\n\nfunc main() { fmt.Println(%d) }\n", nth)
	}
	cell := func() (float64, error) {
		var out strings.Builder
		start := time.Now()
		e, err := b.cl.Interpreters(id).Run(ctx, client.Code{Text: source(), Context: c.ID})
		if err != nil {
			return 0, err
		}
		err = e.Wait(&out, io.Discard, func(map[string]string) error { return nil })
		took := ms(time.Since(start))
		if err == nil && out.String() != fmt.Sprintln(nth) {
			err = fmt.Errorf("program %d prints %q", nth, out.String())
		}
		return took, err
	}
	changed := func() (float64, error) {
		nth++
		return cell()
	}
	command := func() (float64, error) {
		nth++
		src := source()
		err := b.cl.Files(id).Put(ctx, []client.Upload{{
			Path: "/root/x.go", Mode: 644, Size: int64(len(src)),
			Open: func() (io.ReadCloser, error) {
				return io.NopCloser(strings.NewReader(src)), nil
			},
		}})
		if err != nil {
			return 0, err
		}
		start := time.Now()
		_, err = b.exec(ctx, id, "go", "run", "/root/x.go")
		return ms(time.Since(start)), err
	}
	a, t, err := turns(b.times(20, 2), 2, changed, command)
	if err != nil {
		return err
	}
	b.add(row("code_go_changed", rt, "ms", a, "go run of such a program", t, goal{}))
	again, _, err := turns(b.times(20, 2), 1, cell, func() (float64, error) { return 0, nil })
	if err != nil {
		return err
	}
	b.add(row("code_go_second", rt, "ms", again, "", nil, goal{maxP50: 300}))
	return nil
}

// idleInterpreter: how much a sandbox's memory on the host grows with a python context,
// against a sandbox with a waiting python.
func idleInterpreter(ctx context.Context, b *bench) error {
	for _, rt := range runtimes {
		grown := func(begin func(id string) (io.Closer, error)) func() (float64, error) {
			return func() (v float64, err error) {
				sb, err := b.codeSandbox(ctx, rt)
				if err != nil {
					return 0, err
				}
				defer func() { err = errors.Join(err, b.drop(ctx, sb.ID)) }()
				// Run Python once, so that its part of the host's page cache, and the agent's memory
				// for a first command, do not count.
				if _, err := b.exec(ctx, sb.ID, "python3", "-c", "pass"); err != nil {
					return 0, err
				}
				time.Sleep(time.Second) // as idle_memory does
				before, err := b.pss(ctx, sb.ID)
				if err != nil {
					return 0, err
				}
				p, err := begin(sb.ID)
				if err != nil {
					return 0, err
				}
				defer p.Close()
				time.Sleep(time.Second)
				after, err := b.pss(ctx, sb.ID)
				return after - before, err
			}
		}
		context := grown(func(id string) (io.Closer, error) {
			_, err := b.cl.Interpreters(id).Create(ctx, "python", "")
			return io.NopCloser(nil), err
		})
		bare := grown(func(id string) (io.Closer, error) {
			return b.cl.Start(ctx, id, client.Command{Argv: []string{"python3", "-c", "import signal; signal.pause()"}})
		})
		a, t, err := turns(b.times(6, 1), 0, context, bare)
		if err != nil {
			return err
		}
		b.add(row("interpreter_idle_memory", rt, "MiB", a, "python3 that waits for a signal", t, goal{maxRatio: 1.5}))
	}
	return nil
}
