// Package programs puts Debian's PostgreSQL, Redis, nginx and mosquitto behind
// Services, in network namespaces, and uses them with their own clients.
//
//	make test-programs
//
// installs the packages and runs the tests, which have the build tag programs.
// They take two minutes, because a client that stops reading is left alone for
// longer than a minute. `make test-programs-quick`, which CI runs, has it stop for
// two seconds, and all tests take half a minute.
package programs
