// Package compile makes programs for seccomp(2) of the table in internal/seccomp.
//
// A program checks the architecture, then searches the number of the call by halves: about
// nine jumps. Where the number decides, the program ends there. Where arguments decide, it
// tests these. The order of the search does not matter: the kernel remembers which numbers
// are allowed whatever their arguments are (internal/seccomp).
//
// Source: linux/seccomp.h, struct seccomp_data.
package compile

import (
	"bytes"
	"fmt"
	"go/format"
	"maps"
	"reflect"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sandboxd/sandboxd/internal/seccomp"
)

// Arches are the machines that programs are made for, with the kernel's names
// (linux/audit.h). Both are little endian, and both pass clone's flags first.
var Arches = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// Offsets in struct seccomp_data.
const (
	atNumber = 0
	atArch   = 4
	atArgs   = 16
)

// Program returns the program of a level other than Compat for goarch.
func Program(goarch string, level seccomp.Level) ([]bpf.Instruction, error) {
	arch, ok := Arches[goarch]
	if !ok {
		return nil, fmt.Errorf("no seccomp program for %s", goarch)
	}
	search, err := search(ranges(goarch, level))
	if err != nil {
		return nil, fmt.Errorf("compile level %s for %s: %w", level, goarch, err)
	}
	return append([]bpf.Instruction{
		load(atArch),
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: arch, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS},
		load(atNumber),
	}, search...), nil
}

// A span is the numbers from first up to the next span's first, which have one answer.
type span struct {
	first    uint32
	refusals []seccomp.Refusal
}

// ranges returns spans that cover all numbers, the lowest first.
func ranges(goarch string, level seccomp.Level) (spans []span) {
	known := map[uint32][]seccomp.Refusal{}
	for _, c := range seccomp.Table {
		if n := c.Number(goarch); n >= 0 {
			known[uint32(n)] = c.Verdict.At(level)
		}
	}
	known[seccomp.NoCall] = seccomp.Lookup(goarch, seccomp.NoCall).Verdict.At(level)
	next := uint32(0) // the first number without an answer
	add := func(n uint32) {
		r, ok := known[n]
		if !ok {
			r = seccomp.Lookup(goarch, n).Verdict.At(level)
		}
		if len(spans) == 0 || !reflect.DeepEqual(spans[len(spans)-1].refusals, r) {
			spans = append(spans, span{n, r})
		}
	}
	for _, n := range slices.Sorted(maps.Keys(known)) {
		if n > next {
			add(next) // and all up to n
		}
		add(n)
		next = n + 1
	}
	return spans
}

// search returns the code that ends with the answer of the span that the number, which is
// loaded, lies in.
func search(spans []span) ([]bpf.Instruction, error) {
	if len(spans) == 1 {
		return answer(spans[0].refusals)
	}
	middle := len(spans) / 2
	below, err := search(spans[:middle])
	if err != nil {
		return nil, err
	}
	above, err := search(spans[middle:])
	if err != nil {
		return nil, err
	}
	jump := bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: spans[middle].first}
	code := []bpf.Instruction{jump}
	if len(below) <= 255 {
		jump.SkipTrue = uint8(len(below))
		code[0] = jump
	} else { // too far for a condition
		jump.SkipFalse = 1
		code = []bpf.Instruction{jump, bpf.Jump{Skip: uint32(len(below))}}
	}
	return slices.Concat(code, below, above), nil
}

// answer returns the code that ends with the first refusal whose tests hold, or allows.
func answer(refusals []seccomp.Refusal) ([]bpf.Instruction, error) {
	code := []bpf.Instruction{}
	for _, r := range refusals {
		c, err := refusal(r)
		if err != nil {
			return nil, err
		}
		code = append(code, c...)
		if len(r.If) == 0 {
			return code, nil // nothing comes after it
		}
	}
	return append(code, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}), nil
}

// refusal returns the code of r. If one of its tests does not hold, the code that follows
// it runs.
func refusal(r seccomp.Refusal) ([]bpf.Instruction, error) {
	code := []bpf.Instruction{bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(r.Errno)}}
	for _, t := range slices.Backward(r.If) {
		at := uint32(atArgs + 8*t.Arg)
		if t.High {
			at += 4
		}
		test := []bpf.Instruction{load(at)}
		if t.Mask != 0 {
			test = append(test, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: t.Mask})
		}
		if len(t.In) == 0 || len(t.In)+len(code) > 255 {
			return nil, fmt.Errorf("a test of argument %d has %d values, before %d instructions", t.Arg, len(t.In), len(code))
		}
		for i, v := range t.In {
			left := len(t.In) - 1 - i
			jump := bpf.JumpIf{Cond: bpf.JumpEqual, Val: v}
			switch {
			case t.Not: // equal to one: does not hold
				jump.SkipTrue = uint8(left + len(code))
			case left > 0:
				jump.SkipTrue = uint8(left)
			default: // equal to none
				jump.SkipFalse = uint8(len(code))
			}
			test = append(test, jump)
		}
		code = append(test, code...)
	}
	return code, nil
}

func load(at uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: at, Size: 4} }

// Source returns the Go file with the programs of goarch. An instruction is struct
// sock_filter (linux/filter.h) as one number, little endian: code, jt, jf, k.
func Source(goarch string) ([]byte, error) {
	b := bytes.NewBufferString("// Code generated by internal/seccomp/compile; DO NOT EDIT.\n\npackage seccomp\n")
	for _, level := range []seccomp.Level{seccomp.Default, seccomp.Strict} {
		program, err := Program(goarch, level)
		if err != nil {
			return nil, err
		}
		raw, err := bpf.Assemble(program)
		if err != nil {
			return nil, fmt.Errorf("assemble level %s for %s: %w", level, goarch, err)
		}
		fmt.Fprintf(b, "\nvar %sProgram = [...]uint64{", level)
		for i, op := range raw {
			if i%6 == 0 {
				b.WriteString("\n")
			}
			fmt.Fprintf(b, "0x%016x,", uint64(op.K)<<32|uint64(op.Jf)<<24|uint64(op.Jt)<<16|uint64(op.Op))
		}
		b.WriteString("\n}\n")
	}
	return format.Source(b.Bytes())
}
