package main

import (
	"errors"
	"fmt"
)

// errReported ends the program with status 1 without another line: the error was
// reported already.
var errReported = errors.New("reported")

// exitCode is an error that carries the exit status of a program that sluice
// ran for the user.
type exitCode int

func (c exitCode) Error() string { return fmt.Sprintf("exit status %d", int(c)) }
