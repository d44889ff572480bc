package attach

import (
	"errors"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// changesBuffer is how many bytes of changes the kernel may queue: some 1,000 changes, as when a
// node starts hundreds of pods.
const changesBuffer = 4 << 20

// changes reports which interfaces change. If its reader is too slow, the kernel drops changes,
// and the channel is closed.
type changes struct {
	namespace int
	updates   chan netlink.LinkUpdate // nil before begin
	done      chan struct{}
}

// begin starts listening, or starts again. It does not report earlier changes.
func (c *changes) begin() error {
	c.end()
	o := netlink.LinkSubscribeOptions{ReceiveBufferSize: changesBuffer, ReceiveBufferForceSize: true}
	if c.namespace != 0 {
		h := netns.NsHandle(c.namespace)
		o.Namespace = &h
	}
	updates, done := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	err := netlink.LinkSubscribeWithOptions(updates, done, o)
	if errors.Is(err, syscall.EPERM) { // as much as the system's limit allows
		o.ReceiveBufferForceSize = false
		err = netlink.LinkSubscribeWithOptions(updates, done, o)
	}
	if err != nil {
		return err
	}
	c.updates, c.done = updates, done
	return nil
}

// end listens no more.
func (c *changes) end() {
	if c.updates == nil {
		return
	}
	close(c.done)
	for range c.updates { // else the library would wait until they are read
	}
	c.updates = nil
}

// waiting returns the interfaces of a change and of the changes queued behind it, so that one look
// covers all of them.
func (c *changes) waiting(first netlink.LinkUpdate) map[int]bool {
	const most = 4096 // a look must come
	indices := map[int]bool{int(first.Index): true}
	for range most {
		select {
		case u, ok := <-c.updates:
			if !ok {
				return indices
			}
			indices[int(u.Index)] = true
		default:
			return indices
		}
	}
	return indices
}
