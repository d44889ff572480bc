package attach

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// lost counts what netlink sockets of a network namespace have lost.
func lost(t *testing.T, n *netns.Host) (sum int) {
	t.Helper()
	must.OK(t, n.Do(func() error {
		f, err := os.Open("/proc/thread-self/net/netlink")
		if err != nil {
			return err
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Scan()
		const drops = 8 // "Drops", of the columns
		for lines.Scan() {
			count, err := strconv.Atoi(strings.Fields(lines.Text())[drops])
			if err != nil {
				return err
			}
			sum += count
		}
		return lines.Err()
	}))
	return sum
}

// has reports whether the programs are at an interface.
func (i *Interfaces) has(index int) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, ok := i.links[index]
	return ok
}

// TestChangesAfterALoss: after a burst of changes, of which the kernel has dropped some, a new
// interface gets the programs at once, and so does one that came in the burst.
func TestChangesAfterALoss(t *testing.T) {
	lab := netns.NewLab(t, 1)
	nl, is := lab.Node.Netlink(), opened(t, lab.Node, func(o *Options) { o.Repair = time.Hour })
	added := func(name string) int {
		t.Helper()
		must.OK(t, nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}))
		return lab.Node.Link(t, name).Attrs().Index
	}
	followed := func(name string, index int) {
		t.Helper()
		wait.For(t, "the programs are at the interface "+name, patience, func() error {
			if !is.has(index) {
				return fmt.Errorf("not at %d", index)
			}
			return nil
		})
	}
	followed("before", added("before"))
	for round := range 2 {
		name := fmt.Sprintf("burst%d", round)
		is.mu.Lock() // nobody reads
		b1, before := lab.Node.Link(t, "b1"), lost(t, lab.Node)
		deadline := time.Now().Add(patience)
		for n := 0; lost(t, lab.Node) == before; n++ {
			for i := range 100 {
				check.OK(t, nl.LinkSetAlias(b1, strconv.Itoa(i)))
			}
			if time.Now().After(deadline) {
				is.mu.Unlock()
				t.Fatalf("nothing is lost of %d changes", n*100)
			}
		}
		index := added(name)
		is.mu.Unlock()
		followed(name, index)
		followed("behind", added(fmt.Sprintf("behind%d", round)))
	}
}

// TestChangesThatWait: one look is for all changes that wait.
func TestChangesThatWait(t *testing.T) {
	update := func(index int32) (u netlink.LinkUpdate) {
		u.Index = index
		return u
	}
	for _, closed := range []bool{false, true} {
		c := changes{updates: make(chan netlink.LinkUpdate, 10)}
		for _, index := range []int32{3, 4, 3, 5} {
			c.updates <- update(index)
		}
		if closed {
			close(c.updates)
		}
		indices := c.waiting(update(2))
		if len(c.updates) > 0 || fmt.Sprint(indices) != "map[2:true 3:true 4:true 5:true]" {
			t.Errorf("%v, and %d changes wait", indices, len(c.updates))
		}
	}
}
