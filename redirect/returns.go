package redirect

// ReturnTTL is the TTL, or hop limit, of packets to an endpoint whose address may
// be a Service's ([service.Endpoint.MayReturn]). Listeners take none with so
// little: a connection that comes to a Service again, here or on another node,
// ends there, whatever the mode. It reaches every node of a cluster, and no client's
// packets have so little left.
const ReturnTTL = 8

// FirstReturnTTL is the same for a connection, or a datagram, that has passed no
// other proxy: an endpoint may be a node port of another cluster, or of another
// node, whose proxy takes it to a pod.
const FirstReturnTTL = 24

// TTLAfter returns the TTL towards such an endpoint for a client's TTL.
func TTLAfter(client int) int {
	if client > FirstReturnTTL {
		return FirstReturnTTL
	}
	return ReturnTTL
}
