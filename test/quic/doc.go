// Package quic tests QUIC through a UDP Service.
package quic
