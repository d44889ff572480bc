// Package dnscache has NodeLocal DNSCache come and go on a node with Sluice.
package dnscache
