// Package coredns asks CoreDNS and Sluice the same questions about the same Services.
package coredns
