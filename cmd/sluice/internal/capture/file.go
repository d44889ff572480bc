package capture

import (
	"encoding/binary"
	"io"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// File writes packets in the format of libpcap, with times in ns and the link type
// LINUX_SLL2, which names the interface of each packet.
type File struct {
	out     io.Writer
	written int64
	record  []byte
}

const (
	magic    = 0xa1b23c4d // times in ns
	linkType = 276        // LINKTYPE_LINUX_SLL2
	// linkHeader is the length of the header of LINKTYPE_LINUX_SLL2, and recordHeader that
	// of each packet.
	linkHeader, recordHeader = 20, 16
)

// NewFile begins a file of packets of which at most snap bytes are kept.
func NewFile(out io.Writer, snap int) (*File, error) {
	f := &File{out: out}
	b := binary.LittleEndian.AppendUint32(nil, magic)
	b = binary.LittleEndian.AppendUint16(b, 2) // version 2.4
	b = binary.LittleEndian.AppendUint16(b, 4)
	b = append(b, make([]byte, 8)...) // time zone and accuracy, which nobody uses
	b = binary.LittleEndian.AppendUint32(b, uint32(snap+linkHeader))
	b = binary.LittleEndian.AppendUint32(b, linkType)
	return f, f.write(b)
}

// Written returns the size of the file.
func (f *File) Written() int64 { return f.written }

// Write adds a packet.
func (f *File) Write(p *sys.Captured) error {
	b := binary.LittleEndian.AppendUint32(f.record[:0], uint32(p.Time.Unix()))
	b = binary.LittleEndian.AppendUint32(b, uint32(p.Time.Nanosecond()))
	b = binary.LittleEndian.AppendUint32(b, uint32(linkHeader+len(p.Data)))
	b = binary.LittleEndian.AppendUint32(b, uint32(linkHeader+max(p.Wire, len(p.Data))))
	b = binary.BigEndian.AppendUint16(b, p.Frame.EtherType)
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint32(b, p.Frame.Interface)
	b = binary.BigEndian.AppendUint16(b, p.Frame.Hardware)
	b = append(b, p.Frame.Kind, p.Frame.Length)
	b = append(b, p.Frame.Address[:]...)
	f.record = append(b, p.Data...)
	return f.write(f.record)
}

func (f *File) write(b []byte) error {
	n, err := f.out.Write(b)
	f.written += int64(n)
	return err
}
