// Package quic holds tests of QUIC through a Service of UDP.
package quic
