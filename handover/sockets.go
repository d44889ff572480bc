package handover

import (
	"maps"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Sockets holds the sockets of an earlier process until Take returns them. A nil *Sockets is
// empty. It belongs to one goroutine.
type Sockets struct {
	byName map[string][]Socket
	States []State // sent with them
}

func (s *Sockets) add(socket Socket) {
	if s.byName == nil {
		s.byName = make(map[string][]Socket)
	}
	s.byName[socket.Name] = append(s.byName[socket.Name], socket)
}

// Take removes and returns the sockets of a name, in the order in which they were sent. The
// caller owns them.
func (s *Sockets) Take(name string) []Socket {
	if s == nil {
		return nil
	}
	found := s.byName[name]
	delete(s.byName, name)
	return found
}

// TakeOne is Take of the first socket of a name. ok is false if there is none.
func (s *Sockets) TakeOne(name string) (socket Socket, ok bool) {
	found := s.Take(name)
	if len(found) == 0 {
		return socket, false
	}
	if len(found) > 1 {
		s.byName[name] = found[1:]
	}
	return found[0], true
}

// Names returns the names of the sockets that are left, sorted.
func (s *Sockets) Names() []string {
	if s == nil {
		return nil
	}
	return slices.Sorted(maps.Keys(s.byName))
}

// Close closes the remaining sockets, and returns their names.
func (s *Sockets) Close() (names []string) {
	if s == nil {
		return nil
	}
	names = s.Names()
	for _, each := range s.byName {
		for _, socket := range each {
			sys.Close(socket.FD)
		}
	}
	s.byName = nil
	return names
}
