package nftables

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/serviceplane/serviceplane/internal/netlinkx"
	"github.com/serviceplane/serviceplane/internal/netns/netnstest"
	"github.com/serviceplane/serviceplane/internal/nft"
)

// resizing is a kernel that resizes a hash table at each dump of elements but the third: an
// element comes twice, and another one does not come.
type resizing struct {
	kernel

	dumps int
}

func (r *resizing) Dump(ctx context.Context, w *nft.Batch, reset func(), each func(attrs []byte)) error {
	r.dumps++
	moved := false
	return r.kernel.Dump(ctx, w, reset, func(attrs []byte) {
		var items [][]byte
		for _, item := range netlinkx.Attributes(netlinkx.Find(attrs, unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			items = append(items, item)
		}
		if n := len(items); n > 1 && r.dumps%3 != 0 && !moved {
			moved = true
			copy(items[n-1], items[0])
		}
		each(attrs)
	})
}

// A dump during a resize is read again, also where the kernel does not count elements.
func TestADumpDuringAResizeIsReadAgain(t *testing.T) {
	eachFamily(t, func(t *testing.T, w *world) {
		e, m := w.engine(t, netnstest.New(t)), verified(w)
		mustApply(t, e, m.full(w))
		read := func() *observation {
			o, err := e.observe(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for name, set := range o.sets {
				set.counted = false // as older kernels
				o.sets[name] = set
			}
			if err := e.observeElements(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			return o
		}
		want := read()
		r := &resizing{kernel: e.kernel}
		e.kernel = r
		got, sets := read(), 0
		for i := range setSpecs {
			id := setSpecs[i].id
			if diff := cmp.Diff(want.element[id], got.element[id]); diff != "" {
				t.Errorf("%s (-want +got):\n%s", setSpecs[i].name, diff)
			}
			if len(want.element[id]) > 1 {
				sets++
			}
		}
		if sets < 3 {
			t.Errorf("%d sets have more than one element, want 3 or more", sets)
		}
	})
}
