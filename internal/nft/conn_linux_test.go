package nft

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// eachCall runs a test for each kind of call to the kernel: a transaction that is refused, a list
// of tables, and a query of two of them and another one. call makes one, and returns whether it got
// all that the kernel says.
func eachCall(t *testing.T, test func(t *testing.T, open func() *Conn, call func(ctx context.Context, k *Conn) (whole bool, err error))) {
	ns := netnstest.New(t)
	open := func() *Conn {
		k, err := Dial(ns.Path())
		netnstest.Check(t, err)
		t.Cleanup(func() { _ = k.Close() })
		return k
	}
	batch := func(table string, what func(b *Batch)) *Batch {
		w := &Batch{Family: unix.NFPROTO_IPV4, Table: table}
		w.Begin()
		what(w)
		w.Finish()
		return w
	}
	for _, table := range []string{"one", "two"} {
		netnstest.Check(t, open().Commit(t.Context(), batch(table, func(b *Batch) { b.NewTable(0, nil) })))
	}
	for name, call := range map[string]func(ctx context.Context, k *Conn) (whole bool, err error){
		"transaction": func(ctx context.Context, k *Conn) (bool, error) {
			err := k.Commit(ctx, batch("none", (*Batch).DeleteTable))
			if errors.Is(err, unix.ENOENT) {
				return true, nil
			}
			return false, err
		},
		"list": func(ctx context.Context, k *Conn) (bool, error) {
			n := 0
			err := k.Dump(ctx, getTables(unix.NLM_F_DUMP, ""), func() { n = 0 }, func([]byte) { n++ })
			return n == 2, err
		},
		"query": func(ctx context.Context, k *Conn) (bool, error) {
			n := 0
			err := k.Query(ctx, getTables(0, "one", "none", "two"), func(int, []byte) { n++ })
			return n == 2, err
		},
	} {
		t.Run(name, func(t *testing.T) { test(t, open, call) })
	}
}

// getTables requests tables by name.
func getTables(flags uint16, tables ...string) *Batch {
	w := &Batch{Family: unix.NFPROTO_IPV4, Table: ""}
	for _, table := range tables {
		w.Start(unix.NFT_MSG_GETTABLE, flags, "get", "table "+table)
		if table != "" {
			w.Text(unix.NFTA_TABLE_NAME, table)
		}
		w.End()
	}
	return w
}

// TestAShortAnswerIsNoSuccess cuts the kernel's answers after each number of bytes. A call gets an
// error until the answer is whole. Objects that are not in a short list would be added again, and a
// refused transaction would count as done.
func TestAShortAnswerIsNoSuccess(t *testing.T) {
	t.Parallel()
	eachCall(t, func(t *testing.T, open func() *Conn, call func(context.Context, *Conn) (bool, error)) {
		for size := 1; ; size++ {
			k := open()
			k.Buffer = k.Buffer[:size]
			whole, err := call(t.Context(), k)
			if err == nil && !whole {
				t.Errorf("with %d bytes of the answer there is no error", size)
			}
			if whole && err == nil {
				t.Logf("whole with %d bytes", size)
				break
			}
			if err != nil && !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("with %d bytes the error is %v, want %v", size, err, unix.EMSGSIZE)
			}
		}
	})
	if got := (netlinkx.Message{Type: unix.NLMSG_ERROR, Body: []byte{0, 0}}).Errno(); got != unix.EBADMSG {
		t.Errorf("an acknowledgement without its result means %v, want %v", got, unix.EBADMSG)
	}
}

// TestALateAnswerIsNoAnswer: the kernel's answers to earlier requests come first. They have other
// sequence numbers, and must not count as answers to the call.
func TestALateAnswerIsNoAnswer(t *testing.T) {
	t.Parallel()
	eachCall(t, func(t *testing.T, open func() *Conn, call func(context.Context, *Conn) (bool, error)) {
		for name, earlier := range map[string]*Batch{
			"found":        getTables(0, "two"),
			"missing":      getTables(0, "none"),
			"acknowledged": getTables(unix.NLM_F_ACK, "one"),
			"many":         getTables(0, "one", "two", "none", "two", "two"),
			"list":         getTables(unix.NLM_F_DUMP, ""),
		} {
			k := open()
			for _, before := range []uint32{0, math.MaxUint32 - 1} { // also when the numbers begin again
				k.Number(int(before - k.Number(0)))
				netnstest.Check(t, k.send(earlier))
				for range 2 {
					whole, err := call(t.Context(), k)
					if name == "list" && errors.Is(err, unix.EBUSY) {
						continue // one list at a time
					}
					if err != nil || !whole {
						t.Errorf("%s, late: the call gets everything: %v, %v; want its own answer", name, whole, err)
					}
				}
			}
		}
	})
}

// A call without an answer ends when its time is over or its context ends, and the next call on the same socket
// succeeds. The kernel does not answer NLMSG_NOOP.
func TestACallWithoutAnAnswerEnds(t *testing.T) {
	t.Parallel()
	nothing := func() *Batch {
		w := &Batch{Family: unix.NFPROTO_IPV4, Table: ""}
		w.begin(unix.NLMSG_NOOP, 0, "get", "nothing")
		w.End()
		return w
	}
	eachCall(t, func(t *testing.T, open func() *Conn, call func(context.Context, *Conn) (bool, error)) {
		k := open()
		for name, silent := range map[string]func(ctx context.Context) error{
			"list":  func(ctx context.Context) error { return k.Dump(ctx, nothing(), func() {}, func([]byte) {}) },
			"query": func(ctx context.Context) error { return k.Query(ctx, nothing(), func(int, []byte) {}) },
		} {
			k.Patience = time.Millisecond
			err := silent(t.Context())
			if !errors.Is(err, netlinkx.ErrNoAnswer) || !strings.Contains(err.Error(), "nothing") {
				t.Errorf("%s: %v, want %v, and what was asked", name, err, netlinkx.ErrNoAnswer)
			}
			k.Patience = time.Hour
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error)
			go func() { done <- silent(ctx) }()
			cancel(nil)
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v, want %v", name, err, context.Canceled)
			}
			if whole, err := call(t.Context(), k); err != nil || !whole {
				t.Errorf("after %s without an answer: the call gets everything: %v, %v", name, whole, err)
			}
		}
	})
}
