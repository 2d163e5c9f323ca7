package nftables

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
)

// TestAShortAnswerIsNoSuccess cuts the kernel's answers after each number of bytes: that a
// transaction is refused, a list of tables, and the answers about two of them. It gets an error
// until the answer is whole. Objects that are not in a short list would be added again, and a
// refused transaction would count as done.
func TestAShortAnswerIsNoSuccess(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	open := func() *socket {
		k, err := openSocket(ns.Path())
		netnstest.Check(t, err)
		t.Cleanup(func() { _ = k.close() })
		return k
	}
	batch := func(table string, what func(w *wire)) *wire {
		w := &wire{family: unix.NFPROTO_IPV4, table: table}
		w.batchMarker(unix.NFNL_MSG_BATCH_BEGIN)
		what(w)
		w.batchMarker(unix.NFNL_MSG_BATCH_END)
		return w
	}
	for _, table := range []string{"one", "two"} {
		netnstest.Check(t, open().commit(t.Context(), batch(table, (*wire).newTable)))
	}
	get := func(flags uint16, tables ...string) *wire {
		w := &wire{family: unix.NFPROTO_IPV4}
		for _, table := range tables {
			w.begin(msgGetTable, flags, "get", "table "+table)
			if table != "" {
				w.attrString(unix.NFTA_TABLE_NAME, table)
			}
			w.end()
		}
		return w
	}
	// Each returns whether it got all that the kernel says.
	for name, call := range map[string]func(k *socket) (whole bool, err error){
		"transaction": func(k *socket) (bool, error) {
			err := k.commit(t.Context(), batch("none", (*wire).deleteTable))
			if errors.Is(err, unix.ENOENT) {
				return true, nil
			}
			return false, err
		},
		"list": func(k *socket) (bool, error) {
			n := 0
			err := k.dump(t.Context(), get(unix.NLM_F_DUMP, ""), func() { n = 0 }, func([]byte) { n++ })
			return n == 2, err
		},
		"query": func(k *socket) (bool, error) {
			n := 0
			err := k.query(t.Context(), get(0, "one", "none", "two"), func([]byte) { n++ })
			return n == 2, err
		},
	} {
		for size := 1; ; size++ {
			k := open()
			k.receive = k.receive[:size]
			whole, err := call(k)
			if err == nil && !whole {
				t.Errorf("%s: with %d bytes of the answer there is no error", name, size)
			}
			if whole && err == nil {
				t.Logf("%s: whole with %d bytes", name, size)
				break
			}
			if err != nil && !errors.Is(err, unix.EMSGSIZE) {
				t.Errorf("%s: with %d bytes the error is %v, want %v", name, size, err, unix.EMSGSIZE)
			}
		}
	}
	if got := (header{typ: unix.NLMSG_ERROR, body: []byte{0, 0}}).errno(); unix.Errno(got) != unix.EBADMSG {
		t.Errorf("an acknowledgement without its result means %v, want %v", unix.Errno(got), unix.EBADMSG)
	}
}
