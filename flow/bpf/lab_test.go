package bpf

import "time"

// patience bounds every wait of the tests.
const patience = 20 * time.Second

// TCP flags.
const (
	flagRST = 4
	flagACK = 16
)

// Types of SCTP chunks.
const (
	chunkInit    = 1
	chunkInitAck = 2
	chunkAbort   = 6
)
