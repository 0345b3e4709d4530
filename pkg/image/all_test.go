//go:build all

package image

// everything is whether the images of all recipes are built twice.
const everything = true
