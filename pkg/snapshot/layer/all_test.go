//go:build all

package layer

// everything is whether the largest layers are unpacked, too.
const everything = true
