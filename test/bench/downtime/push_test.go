//go:build !all

package downtime_test

const sandboxes = 4 // on each runtime
