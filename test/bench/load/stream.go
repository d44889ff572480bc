package load

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// streamer reads or writes bulk streams.
type streamer struct {
	m      meter
	poll   *poller
	buf    []byte
	upload bool
}

func newStreamer(targets *rotation, streams int, upload bool) (*streamer, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	s := &streamer{poll: p, buf: make([]byte, bulkSize), upload: upload}
	events := uint32(unix.EPOLLIN)
	if upload {
		events = unix.EPOLLOUT
	}
	for i := range streams {
		fd, err := connected(targets.next())
		if err != nil {
			return nil, fmt.Errorf("stream %d: %w", i, err)
		}
		if errno := p.add(fd, events, int32(fd)); errno != 0 {
			return nil, fmt.Errorf("epoll: %w", errno)
		}
	}
	return s, nil
}

func (s *streamer) meter() *meter { return &s.m }

func (s *streamer) run(w window) {
	s.m.open(w)
	for s.m.tick(now()) {
		for _, ev := range s.poll.wait(20) {
			fd := int(ev.Fd)
			n, errno := s.move(fd)
			switch {
			case errno == unix.EAGAIN:
			case errno != 0:
				s.m.failed(errno.Error())
				closeFD(fd)
			case n == 0:
				s.m.failed("stream ended")
				closeFD(fd)
			default:
				s.m.bytes += uint64(n)
				s.m.reads++
			}
		}
	}
}

func (s *streamer) move(fd int) (int, unix.Errno) {
	if s.upload {
		return write(fd, s.buf)
	}
	return read(fd, s.buf)
}
