// Package node is the proxy of a node, wired together: the rooms, the loop that owns the
// configuration, limits, status, metrics and what follows the API server's objects of this
// node. Package main has the flags that become its Config.
//
//	p, err := node.New(config, log) // changes nothing in the kernel yet
//	err = p.Run(ctx, hangups)       // serves until ctx ends, then removes what it made
//
// Run's goroutine owns the configuration: the Store, the policy's Table and the plan. What
// comes from other goroutines (changes of objects, of the node's addresses, requests of the
// admin socket) reaches it through channels.
package node
