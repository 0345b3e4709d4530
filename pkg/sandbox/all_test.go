//go:build all

package sandbox

// everything is whether TestEveryFault runs every pair of a fault and a death.
const everything = true
