package relay

// chunk holds bytes that were read but not yet written: buffer[from:to].
type chunk struct {
	next   *chunk // next unused chunk in the pool
	buffer []byte
	from   int32
	to     int32
}

func (c *chunk) bytes() []byte { return c.buffer[c.from:c.to] }

// chunkSizes are the sizes of chunks. The last is the size of a worker's buffer.
var chunkSizes = [...]int{2 << 10, 16 << 10, bufferSize}

// chunksKept is how many unused chunks of each size a pool keeps.
const chunksKept = 16

// chunkPool keeps a worker's unused chunks for reuse by blocked directions.
type chunkPool struct {
	free  [len(chunkSizes)]*chunk
	count [len(chunkSizes)]int
}

// take returns a chunk with a copy of p. p is not larger than a worker's buffer.
func (cp *chunkPool) take(p []byte) *chunk {
	class := 0
	for chunkSizes[class] < len(p) {
		class++
	}
	c := cp.free[class]
	if c == nil {
		c = &chunk{buffer: make([]byte, chunkSizes[class])}
	} else {
		cp.free[class], c.next = c.next, nil
		cp.count[class]--
	}
	c.from, c.to = 0, int32(copy(c.buffer, p))
	return c
}

func (cp *chunkPool) put(c *chunk) {
	class := 0
	for chunkSizes[class] < len(c.buffer) {
		class++
	}
	if cp.count[class] == chunksKept {
		return
	}
	c.next, cp.free[class] = cp.free[class], c
	cp.count[class]++
}
