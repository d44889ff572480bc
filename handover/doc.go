// Package handover carries listening sockets from a running sluice to the one that takes its
// place. It knows sockets by their names, not by their purpose.
//
// The running process makes an [Offer]: an abstract unix socket, which only processes in the
// same network namespace reach. Each side accepts only a process of its own user that proves its
// right to steer, also in another PID namespace. The next process connects by [Dial].
//
//	next                    running
//	proof            ->     checks it first
//	                 <-     proof
//	hello            ->
//	                 <-     welcome, or refuse: the next one has changed nothing
//	kept             ->     states and over: manifests' last good content; any number of times
//	ask              ->     stops changing anything
//	                 <-     sockets, in batches; each is acknowledged (taken)
//	                 <-     clients
//	                 <-     state: what the next one may use
//	                 <-     over
//	serving          ->
//	                 <-     state: what came since
//	                 <-     leaving: it has stopped to receive datagrams
//	                 <-     UDP sessions (moved), each batch answered (taken) and confirmed (yours)
//	                 <-     over: the next one receives datagrams; the running one closes its part
//	                 <-     state: totals, until the end
//	                 <-     left, and connections (moved), while it serves what is open until that ends
//	                        then the connection ends with the running process
//
// Until leaving is sent, the running process keeps everything: if the connection ends, or
// a step takes longer than [Patience], it goes on as before. Meanwhile both may read from a
// socket; the running process decides when it stops.
//
// A message is one packet of JSON (SOCK_SEQPACKET). Unknown fields are
// ignored. [Hello] has the versions that each side understands.
package handover

import "time"

// Version is that of the messages that this program sends, and Least the oldest that it
// understands. Version 1 was of programs before the first release, which differed.
const (
	Version = 2
	Least   = 2
)

// Patience bounds each step that is not the other process's own work: a process that
// takes longer is taken for dead.
const Patience = 15 * time.Second
