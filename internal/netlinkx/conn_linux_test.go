package netlinkx

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestAnswers reads what a kernel may send after a request: late answers of others, lists that others interrupt,
// errors, nothing.
func TestAnswers(t *testing.T) {
	t.Parallel()
	const object = unix.NFNL_SUBSYS_NFTABLES << 8
	done, ok, refused := []byte{0, 0, 0, 0}, []byte{0, 0, 0, 0}, errnoBytes(unix.EBUSY)
	for _, c := range []struct {
		name    string
		flags   uint16
		answers [][]answer // datagrams, for each attempt
		want    string
		err     error
	}{
		{"one", 0, [][]answer{{{typ: object, text: "a"}}}, "a", nil},
		{"a late one first", 0, [][]answer{{{typ: object, text: "x", late: 1}, {typ: unix.NLMSG_ERROR, body: refused, late: 2}, {typ: object, text: "a"}}}, "a", nil},
		{"refused", 0, [][]answer{{{typ: unix.NLMSG_ERROR, body: refused}}}, "", unix.EBUSY},
		{"an answer that is cut", 0, [][]answer{{{typ: unix.NLMSG_ERROR, body: []byte{0}}}}, "", unix.EBADMSG},
		{"acknowledged", unix.NLM_F_ACK, [][]answer{{{typ: object, text: "a"}, {typ: unix.NLMSG_ERROR, body: ok}}}, "a", nil},
		{"a list", unix.NLM_F_DUMP, [][]answer{{{typ: object, text: "a"}, {typ: object, text: "b"}, {typ: unix.NLMSG_DONE, body: done}}}, "ab", nil},
		{"an empty list", unix.NLM_F_DUMP, [][]answer{{{typ: unix.NLMSG_DONE, body: done}}}, "", nil},
		{"a list that fails", unix.NLM_F_DUMP, [][]answer{{{typ: object, text: "a"}, {typ: unix.NLMSG_DONE, body: refused}}}, "a", unix.EBUSY},
		{"interrupted once", unix.NLM_F_DUMP, [][]answer{
			{{typ: object, text: "a"}, {typ: object, flags: unix.NLM_F_DUMP_INTR, text: "a"}, {typ: unix.NLMSG_DONE, body: done}},
			{{typ: object, text: "a"}, {typ: object, text: "b"}, {typ: unix.NLMSG_DONE, body: done}},
		}, "ab", nil},
		{"interrupted each time", unix.NLM_F_DUMP, slices.Repeat([][]answer{
			{{typ: object, text: "a"}, {typ: unix.NLMSG_DONE, flags: unix.NLM_F_DUMP_INTR, body: done}},
		}, attempts), "a", ErrInterrupted},
		{"nothing", 0, nil, "", ErrNoAnswer},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn, peer := pair(t)
			if len(c.answers) == 0 {
				conn.Patience = time.Millisecond
			}
			go func() {
				request := make([]byte, 1024)
				for _, answers := range c.answers {
					n, err := peer.Read(request)
					if err != nil {
						return
					}
					number := binary.NativeEndian.Uint32(request[:n][8:])
					for _, a := range answers {
						_, _ = peer.Write(a.encode(number))
					}
				}
			}()
			got, err := conn.AskAll(Request(object, c.flags, unix.NFPROTO_IPV4))
			if text := textOf(got); text != c.want || !errors.Is(err, c.err) {
				t.Errorf("answers %q, %v, want %q, %v", text, err, c.want, c.err)
			}
		})
	}
}

// The end of a context ends a call, and the next call works.
func TestTheEndOfAContextEndsACall(t *testing.T) {
	t.Parallel()
	conn, peer := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(time.Millisecond, cancel)
	if err := conn.Ask(ctx, Request(unix.NLMSG_NOOP, 0, 0), nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a call whose context ends: %v, want %v", err, context.Canceled)
	}
	_, err := peer.Write(answer{typ: 1 << 8, text: "a"}.encode(1))
	netnstest.Check(t, err)
	if got, err := conn.AskAll(Request(1<<8, 0, 0)); err != nil || textOf(got) != "a" {
		t.Errorf("the next call: %q, %v, want %q", textOf(got), err, "a")
	}
}

// answer is a message of a kernel.
type answer struct {
	typ, flags uint16
	text       string // the attributes
	body       []byte // instead of them
	late       uint32 // it answers the request so many before
}

func (a answer) encode(number uint32) []byte {
	body := a.body
	if body == nil {
		body = append([]byte{unix.NFPROTO_IPV4, 0, 0, 0}, a.text...)
	}
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	b = binary.NativeEndian.AppendUint16(b, a.typ)
	b = binary.NativeEndian.AppendUint16(b, a.flags)
	b = binary.NativeEndian.AppendUint32(b, number-a.late)
	return append(append(b, 0, 0, 0, 0), body...)
}

func textOf(all []Message) (text string) {
	for _, m := range all {
		_, attrs := m.Netfilter()
		text += string(attrs)
	}
	return text
}

func errnoBytes(errno unix.Errno) []byte {
	return binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))
}

// pair returns a socket, and what plays its kernel.
func pair(t *testing.T) (conn, kernel *Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	netnstest.Check(t, err)
	conn, kernel = connOf(fds[0]), connOf(fds[1])
	t.Cleanup(func() { _, _ = conn.Close(), kernel.Close() })
	return conn, kernel
}
