// Module quic transfers data by QUIC through a Service. It is a module of its
// own because the program itself needs no QUIC.
module github.com/sluice-proxy/sluice/test/quic

go 1.26.0

replace github.com/sluice-proxy/sluice => ../..

require (
	github.com/quic-go/quic-go v0.65.0
	github.com/sluice-proxy/sluice v0.0.0-00010101000000-000000000000
)

require (
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/google/nftables v0.3.0 // indirect
	github.com/mdlayher/netlink v1.7.3-0.20250113171957-fbb4dce95f42 // indirect
	github.com/mdlayher/socket v0.5.1 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/crypto v0.57.0 // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
)
