package confine

// ofMachine are the calls of this machine alone.
var ofMachine []uint32
