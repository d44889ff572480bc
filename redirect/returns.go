package redirect

// ReturnTTL is the TTL, or hop limit, of packets to an endpoint whose address may
// be a Service's ([service.Endpoint.MayReturn]). Listeners take none with so
// little: a connection that comes to a Service again, here or on another node,
// ends there, whatever the way of steering. It reaches every node of a cluster,
// and no client's packets have so little left.
const ReturnTTL = 8
