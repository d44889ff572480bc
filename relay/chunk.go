package relay

// chunk holds bytes that were read but not yet written: buffer[from:to].
type chunk struct {
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
type chunkPool [len(chunkSizes)][]*chunk

// take returns a chunk with a copy of p. p is not larger than a worker's buffer.
func (cp *chunkPool) take(p []byte) *chunk {
	class := classOf(len(p))
	var c *chunk
	if free := cp[class]; len(free) == 0 {
		c = &chunk{buffer: make([]byte, chunkSizes[class])}
	} else {
		c, cp[class] = free[len(free)-1], free[:len(free)-1]
	}
	c.from, c.to = 0, int32(copy(c.buffer, p))
	return c
}

func (cp *chunkPool) put(c *chunk) {
	if class := classOf(len(c.buffer)); len(cp[class]) < chunksKept {
		cp[class] = append(cp[class], c)
	}
}

// classOf returns the index of the smallest size for so many bytes.
func classOf(bytes int) (class int) {
	for chunkSizes[class] < bytes {
		class++
	}
	return class
}
