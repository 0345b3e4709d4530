package main

import (
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentry "gvisor.dev/gvisor/runsc/boot/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter"
)

// The programs that gVisor looks into before it compiles a filter: 12 ms in the
// sentry and 5 in the gofer. Its bazel build fills them in generated code; the
// Go module has stubs there that fill in nothing. sentryFilters and goferFilters
// are the same generated code (precompile), for the variants in use.
//
//go:linkname sentryPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var sentryPrograms map[string]precompiledseccomp.Program

//go:linkname goferPrograms gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var goferPrograms map[string]precompiledseccomp.Program

// useFilters fills them in.
func useFilters() {
	sentry.ListPrecompiled() // makes the map, once
	sentryFilters(sentryPrograms)
	gofer.ListPrecompiled()
	goferFilters(goferPrograms)
}
