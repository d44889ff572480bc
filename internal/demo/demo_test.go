package demo

import "sync"

// program is the real binary, built by the first test that asks for it.
var program struct {
	once sync.Once
	dir  string
	path string
	err  error
}
