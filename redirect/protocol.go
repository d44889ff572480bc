package redirect

import "github.com/sluice-proxy/sluice/service"

// Families is how many address families there are, for a loop over all of them.
const Families = service.IPv6 + 1

// protocolNumbers are those of the Internet Protocol.
var protocolNumbers = [...]uint8{service.TCP: 6, service.UDP: 17, service.SCTP: 132}

// ProtocolNumber returns the number that the Internet Protocol has for a protocol.
func ProtocolNumber(p service.Protocol) uint8 { return protocolNumbers[p] }

// ProtocolOf is ProtocolNumber backwards; 0 for a number of none.
func ProtocolOf(number uint8) service.Protocol {
	for p, n := range protocolNumbers {
		if n == number {
			return service.Protocol(p)
		}
	}
	return 0
}
