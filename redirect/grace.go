package redirect

import "time"

// Grace is the grace period: how long after steering was withdrawn from a
// destination a connection may still arrive whose handshake began before. It is some
// round trips, or one packet that is lost.
const Grace = time.Second
