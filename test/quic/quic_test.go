package quic

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

const (
	vip         = "10.96.0.10"
	port        = 443
	target      = 4433
	protocol    = "bulk"
	testTimeout = 10 * time.Minute
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// leastChanges is how many changes of the endpoints a connection must survive.
const leastChanges = 2

// size is the number of transferred bytes.
func size() uint64 {
	if os.Getenv("SLUICE_TEST_FULL") == "1" {
		return 1 << 30
	}
	return 100 << 20
}

// TestQUICSurvivesChanges transfers data on one connection, whose client and
// server use large packets and GSO batches, while another endpoint is added and
// removed. The connection must stay with its endpoint (A8.9), and the data must
// arrive unchanged.
func TestQUICSurvivesChanges(t *testing.T) {
	lab := netns.NewLab(t, 2)
	stays, comes := lab.Backends[0], lab.Backends[1]
	servers := []*server{serve(t, stays), serve(t, comes)}
	p := start(t, lab.Node, stays.IPv4)
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()

	pc := must.Get(lab.Client.ListenPacket("udp", ":0"))(t)
	defer pc.Close()
	conn, err := quic.Dial(ctx, pc, &net.UDPAddr{IP: net.ParseIP(vip), Port: port},
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}}, settings()) //nolint:gosec // the server's certificate is made by the test
	must.OK(t, err)
	began, n := time.Now(), size()
	result, enough := make(chan error, 1), make(chan struct{})
	var fetched atomic.Uint64 // in bytes
	go func() {
		for {
			err := fetch(ctx, conn, n)
			fetched.Add(n)
			select {
			case <-enough:
			default:
				if err == nil {
					continue // the changes are slower, on a busy machine
				}
			}
			result <- err
			return
		}
	}()
	for changes := 0; ; changes++ {
		if changes == leastChanges {
			close(enough)
		}
		select {
		case err := <-result:
			must.OKf(t, err, "after %d changes", changes)
			took, all := time.Since(began), fetched.Load()
			t.Logf("%d MiB in %v, %.0f MiB/s, during %d changes of the endpoints", all>>20, took.Round(time.Millisecond), float64(all>>20)/took.Seconds(), changes)
			_ = conn.CloseWithError(0, "")
			p.end()
			if got := servers[1].accepted.Load(); got != 0 {
				t.Errorf("the endpoint that came and went accepted %d connections", got)
			}
			return
		default:
		}
		if changes%2 == 0 {
			p.put(stays.IPv4, comes.IPv4)
		} else {
			p.put(stays.IPv4)
		}
	}
}

func settings() *quic.Config {
	return &quic.Config{MaxIdleTimeout: time.Minute, HandshakeIdleTimeout: 20 * time.Second}
}

// fetch requests n bytes and compares their hash with the server's, which follows
// them.
func fetch(ctx context.Context, conn *quic.Conn, n uint64) error {
	stream, err := conn.OpenStreamSync(ctx)
	if err != nil {
		return err
	}
	if _, err := stream.Write(binary.BigEndian.AppendUint64(nil, n)); err != nil {
		return err
	}
	if err := stream.Close(); err != nil {
		return err
	}
	hash := sha256.New()
	if got, err := io.CopyN(hash, stream, int64(n)); err != nil { //nolint:gosec // see size
		return fmt.Errorf("after %d bytes: %w", got, err)
	}
	want, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	if got := hash.Sum(nil); string(got) != string(want) {
		return fmt.Errorf("the hash is %x, the server's is %x", got, want)
	}
	return nil
}

// serveStream sends as many bytes as requested, and their hash.
func serveStream(stream *quic.Stream) error {
	var request [8]byte
	if _, err := io.ReadFull(stream, request[:]); err != nil {
		return err
	}
	var seed [32]byte
	_, _ = rand.Read(seed[:])
	hash := sha256.New()
	n := int64(binary.BigEndian.Uint64(request[:])) //nolint:gosec // see size
	if _, err := io.CopyN(io.MultiWriter(stream, hash), mathrand.NewChaCha8(seed), n); err != nil {
		return err
	}
	if _, err := stream.Write(hash.Sum(nil)); err != nil {
		return err
	}
	return stream.Close()
}

// serve runs a server until the test ends.
func serve(t *testing.T, h *netns.Host) *server {
	t.Helper()
	pc := must.Get(h.ListenPacket("udp", fmt.Sprintf(":%d", target)))(t)
	listener, err := quic.Listen(pc, &tls.Config{Certificates: []tls.Certificate{certificate(t)}, NextProtos: []string{protocol}, MinVersion: tls.VersionTLS13}, settings())
	must.OK(t, err)
	s := &server{}
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() {
		cancel()
		_ = listener.Close()
		_ = pc.Close()
		<-done
	})
	go func() {
		defer close(done)
		s.accept(ctx, t, listener)
	}()
	return s
}

// accept serves one connection after the other, and its streams likewise.
func (s *server) accept(ctx context.Context, t *testing.T, listener *quic.Listener) {
	for {
		conn, err := listener.Accept(ctx)
		if err != nil {
			return
		}
		s.accepted.Add(1)
		for err == nil {
			var stream *quic.Stream
			if stream, err = conn.AcceptStream(ctx); err == nil {
				err = serveStream(stream)
			}
		}
		var closed *quic.ApplicationError
		if !errors.As(err, &closed) && ctx.Err() == nil {
			t.Logf("server: %v", err)
		}
	}
}

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))(t)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
