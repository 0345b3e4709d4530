package upgrade

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandboxd/sandboxd/pkg/api/wire"
	"github.com/sandboxd/sandboxd/pkg/client"
	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/oci"
)

// A prober tries what a version can do, with sandboxes of its own.
type prober struct {
	*client.Client
	// expires: timeouts are kept. They are not while a new schema is tried.
	expires bool
	runtime string
}

// check is one thing that a sandbox does. The first must succeed before others are tried.
type check struct {
	name string
	do   func(ctx context.Context, p prober, id string) error
}

var checks = []check{
	{"a file", probeFile},
	{"a command", probeCommand},
	{"a name", probeName},
	{"a fork", probeFork},
	{"its end", probeEnd},
}

// comesUp names what comes before all checks.
const comesUp = "to come up"

// tried is how a version fared with a sandbox on a runtime.
type tried struct {
	image   string
	failed  map[string]error // by check
	skipped string           // why nothing was tried; "": something was
}

// worse lists what fails now and did not fail before. Where nothing was tried before, only a sandbox that does
// not come up counts: the rest may be the image's fault.
func (now tried) worse(was tried) (all []error) {
	for _, name := range append([]string{comesUp}, names(checks)...) {
		err := now.failed[name]
		known := was.image != ""
		if err != nil && (known && was.failed[name] == nil || !known && name == comesUp) {
			all = append(all, err)
		}
		if name == comesUp && err != nil { // that is why the others failed
			break
		}
	}
	return all
}

// passed lists what succeeded.
func (now tried) passed() string {
	ok := slices.DeleteFunc(names(checks), func(name string) bool { return now.failed[name] != nil })
	return strings.Join(ok, ", ")
}

func names(all []check) (names []string) {
	for _, c := range all {
		names = append(names, c.name)
	}
	return names
}

// candidates is how many images are tried: the smallest may be one that does not start.
const candidates = 3

// tryAll tries each runtime: with the image of before, else with the smallest images until all succeeds.
func (c *Change) tryAll(ctx context.Context, p prober, runtimes []string, before map[string]tried) (map[string]tried, error) {
	images, err := p.Images().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the images: %w", err)
	}
	slices.SortStableFunc(images, func(a, b wire.ImageInfo) int { return cmp.Compare(a.Bytes, b.Bytes) })
	var smallest []string
	for _, i := range images[:min(candidates, len(images))] {
		smallest = append(smallest, i.Name+":"+i.Tag)
	}
	all := map[string]tried{}
	if len(smallest) == 0 {
		return all, nil
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, runtime := range runtimes {
		try := smallest
		if image := before[runtime].image; image != "" {
			try = []string{image}
		}
		wg.Go(func() {
			best := prober{p.Client, p.expires, runtime}.best(ctx, try)
			mu.Lock()
			defer mu.Unlock()
			all[runtime] = best
		})
	}
	wg.Wait()
	return all, nil
}

// best tries images in turn, until one does everything, and returns the one that did most.
func (p prober) best(ctx context.Context, images []string) (best tried) {
	for i, image := range images {
		t := p.try(ctx, image)
		if i == 0 || len(t.failed) < len(best.failed) {
			best = t
		}
		if len(best.failed) == 0 {
			break
		}
	}
	return best
}

// life ends what a prober has made if the program dies.
const life = 10 * time.Minute

func (p prober) try(ctx context.Context, image string) tried {
	t := tried{image: image, failed: map[string]error{}}
	timeout := int64(life / time.Second)
	sb, err := p.Create(ctx, wire.CreateRequest{
		Image: &wire.Image{URI: image}, Timeout: &timeout, NetworkPolicy: json.RawMessage(`{"defaultAction":"deny","egress":[]}`),
		Metadata: map[string]string{"sandboxd.trial": "true"}, ResourceLimits: map[string]string{"memory": "128Mi"},
		Extensions: map[string]string{wire.ExtRuntime: p.runtime, wire.ExtIdle: "true"},
	}, true)
	e, known := errors.AsType[*errs.Error](err)
	switch {
	case errs.Is(err, errs.Exhausted):
		return tried{skipped: fmt.Sprintf("the host is full: %v", err)}
	case known && e.Wire == "SANDBOX::DRAINING": // there is no exception for the version of before, and for older ones
		return tried{skipped: fmt.Sprintf("the host drains: %v", err)}
	case err == nil && sb.Status.State != wire.Running:
		err = fmt.Errorf("it is %s: %s", sb.Status.State, strings.TrimSpace(sb.Status.Reason+" "+sb.Status.Message))
	}
	if err != nil {
		t.failed[comesUp] = fmt.Errorf("a new sandbox of the image %s on %s did not come up: %w", image, p.runtime, err)
		for _, name := range names(checks) {
			t.failed[name] = t.failed[comesUp]
		}
		if sb.ID != "" {
			p.remove(ctx, sb.ID) //nolint:errcheck // the first error counts, and it expires
		}
		return t
	}
	for _, check := range checks {
		if err := check.do(ctx, p, sb.ID); err != nil && !errs.Is(err, errs.Exhausted) {
			t.failed[check.name] = fmt.Errorf("a new sandbox of the image %s on %s came up, and failed with %s: %w", image, p.runtime,
				check.name, err)
		}
	}
	return t
}

// remove deletes a sandbox of the trial, also when the time of the trial is over.
func (p prober) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeLimit)
	defer cancel()
	if err := p.Delete(ctx, id); !errs.Is(err, errs.NotFound) {
		return err
	}
	return nil
}

const removeLimit = 30 * time.Second

const (
	probedFile = "/sandboxd-trial"
	probedText = "as it was written\n"
	// probedName is a name that no server has (RFC 6761, section 6.4).
	probedName = "sandboxd-trial.invalid"
)

// probeFile puts a file into the sandbox, and reads it again.
func probeFile(ctx context.Context, p prober, id string) error {
	err := p.Files(id).Put(ctx, []client.Upload{{
		Path: probedFile, Mode: 644, Size: int64(len(probedText)),
		Open: func() (io.ReadCloser, error) { return io.NopCloser(strings.NewReader(probedText)), nil },
	}})
	if err != nil {
		return err
	}
	f, err := p.Files(id).Download(ctx, probedFile)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<10))
	if err == nil && string(b) != probedText {
		err = fmt.Errorf("%s has %q instead of %q", probedFile, b, probedText)
	}
	return err
}

// probeCommand has a program of the image print that file.
func probeCommand(ctx context.Context, p prober, id string) error {
	cmd, err := p.Start(ctx, id, client.Command{Argv: []string{"cat", probedFile}, Timeout: time.Minute})
	if err != nil {
		return err
	}
	defer cmd.Close()
	var out, said bytes.Buffer
	exit, err := cmd.Wait(&out, &said)
	if err == nil && (exit.Code != 0 || out.String() != probedText) {
		err = fmt.Errorf("cat %s ended with %d %s and printed %.100q, %.100q", probedFile, exit.Code, exit.Error, out.String(),
			said.String())
	}
	return err
}

// probeName has the sandbox ask for a name that its policy refuses: the answer comes from the daemon's
// resolver, so the check needs no other server.
func probeName(ctx context.Context, p prober, id string) error {
	t, err := p.Policy(id).Test(ctx, probedName+":443")
	if err == nil && (t.Step != "resolve" || t.Denied == nil) {
		err = fmt.Errorf("the policy did not refuse the name %s: the step was %s, with the error %q", probedName, t.Step, t.Error)
	}
	return err
}

// probeFork copies the sandbox, on gVisor with its memory, and deletes the copy.
func probeFork(ctx context.Context, p prober, id string) error {
	mode := wire.ForkFiles
	if p.runtime == oci.Runsc {
		mode = wire.ForkMemory
	}
	timeout := int64(life / time.Second)
	f, err := p.Snapshots().Fork(ctx, id, wire.ForkRequest{Count: 1, Mode: mode, Timeout: &timeout}, true)
	if err == nil && f.Status.State != wire.ForkReady {
		err = fmt.Errorf("it is %s: %s", f.Status.State, f.Status.Message)
	}
	for _, child := range f.Sandboxes {
		if err == nil {
			err = probeFile(ctx, p, child.ID)
		}
		err = errors.Join(err, p.remove(ctx, child.ID))
	}
	return err
}

// expiresIn is the timeout that is tried first, and expiryLimit how late its end may come.
const (
	expiresIn   = 500 * time.Millisecond
	expiryLimit = 30 * time.Second
)

// probeEnd lets the timeout of the sandbox end it, or deletes it.
func probeEnd(ctx context.Context, p prober, id string) (err error) {
	defer func() {
		err = errors.Join(err, p.remove(ctx, id))
	}()
	if !p.expires {
		return nil
	}
	in := expiresIn
	for ; ; in *= 4 {
		_, err := p.Renew(ctx, id, time.Now().Add(in))
		if err == nil {
			break
		}
		if !errs.Is(err, errs.Invalid) || in > expiryLimit { // else the request came too late, on a busy host
			return err
		}
	}
	late, cancel := context.WithTimeoutCause(ctx, in+expiryLimit, fmt.Errorf("it was there %s after its time was up", expiryLimit))
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		sb, err := p.Get(late, id)
		if errs.Is(err, errs.NotFound) || err == nil && sb.Status.State != wire.Running {
			return nil
		}
		select {
		case <-tick.C:
		case <-late.Done():
			return context.Cause(late)
		}
	}
}
