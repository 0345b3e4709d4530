//go:build !all

package documents

const everything = false
