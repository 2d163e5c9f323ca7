package ipvs

import (
	"errors"
	"maps"
	"net/netip"
	"testing"

	"go.uber.org/goleak"

	"github.com/serviceplane/serviceplane/desired"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeKernel is IPVS in memory. Like the real one it returns errors for missing objects.
type fakeKernel struct {
	virtuals map[serverKey]*virtual
	busy     map[serverKey]map[netip.AddrPort]int
	// counted are the counters of real servers; kept are those that the kernel keeps after the real
	// server was deleted, because connections refer to it.
	counted map[counterKey]uint32
	kept    map[counterKey]bool
	// missing are the errors for schedulers that it does not have.
	missing map[string]error
	// hidden are the virtual servers that ListFast does not return.
	hidden map[serverKey]bool
	// calls counts all calls, and writes those that change something.
	calls, writes int
	// fault makes a call fail; lost means that a response was lost by it.
	fault fault
	lost  bool
	// onWrite, if set, is called before each write.
	onWrite func(verb string, key serverKey, real netip.AddrPort, weight int)
}

// fault makes the call fail that follows after others. If it is late, the call has had its
// effect, and only the response is lost.
type fault struct {
	armed, late bool
	after       int
}

var (
	errFault = errors.New("the kernel has failed")
	errGone  = errors.New("no such server")
)

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		virtuals: map[serverKey]*virtual{}, busy: map[serverKey]map[netip.AddrPort]int{}, missing: map[string]error{},
		counted: map[counterKey]uint32{}, kept: map[counterKey]bool{},
	}
}

func (k *fakeKernel) setTimeouts(*Config) error { return k.call(func() error { return nil }) }
func (k *fakeKernel) Close()                    {}

// call runs effect, unless the call fails before.
func (k *fakeKernel) call(effect func() error) error {
	k.calls++
	due := k.fault.armed && k.fault.after == 0
	if k.fault.armed {
		k.fault.after--
	}
	if !due {
		return effect()
	}
	late := k.fault.late
	k.fault = fault{}
	if late {
		k.lost = true
		_ = effect() // the response is lost
	}
	return errFault
}

func (k *fakeKernel) write(verb string, key serverKey, real netip.AddrPort, weight int) {
	k.writes++
	if k.onWrite != nil {
		k.onWrite(verb, key, real, weight)
	}
}

func (k *fakeKernel) List() (all map[serverKey]*virtual, err error) {
	err = k.call(func() error {
		all = make(map[serverKey]*virtual, len(k.virtuals))
		for key, v := range k.virtuals {
			all[key] = &virtual{settings: v.settings, reals: maps.Clone(v.reals)}
			if len(k.counted) == 0 { // nobody has connected, or counts
				continue
			}
			all[key].loads = k.loads(key)
		}
		return nil
	})
	return all, err
}

// ListFast returns what List does, except what is hidden.
func (k *fakeKernel) ListFast() (map[serverKey]*virtual, error) {
	all, err := k.List()
	maps.DeleteFunc(all, func(key serverKey, _ *virtual) bool { return k.hidden[key] })
	for _, v := range all {
		v.settings = settings{scheduler: v.scheduler, flags: v.flags & flagPersistent, forward: v.forward}
	}
	return all, err
}

func (k *fakeKernel) Get(key serverKey) (v *virtual, err error) {
	all, err := k.List()
	return all[key], err
}

func (k *fakeKernel) Loads(key serverKey) (all loads, err error) {
	err = k.call(func() error {
		all = k.loads(key)
		return nil
	})
	return all, err
}

func (k *fakeKernel) loads(key serverKey) loads {
	all := loads{}
	if v := k.virtuals[key]; v != nil {
		for real := range v.reals {
			all[real] = load{uint32(k.busy[key][real]), k.counted[counterKey{key, real}]}
		}
	}
	return all
}

func (k *fakeKernel) Put(key serverKey, s settings, isNew bool) error {
	return k.call(func() error {
		if err := k.missing[s.scheduler]; err != nil {
			return err
		}
		v := k.virtuals[key]
		if v == nil && !isNew {
			return errGone
		}
		k.write("put", key, netip.AddrPort{}, 0)
		if v == nil {
			v = &virtual{reals: map[netip.AddrPort]int{}}
			k.virtuals[key] = v
		}
		s.forward = v.forward // only real servers have it
		v.settings = s
		return nil
	})
}

func (k *fakeKernel) Delete(key serverKey) error {
	return k.call(func() error {
		if k.virtuals[key] != nil {
			k.write("delete", key, netip.AddrPort{}, 0)
		}
		delete(k.virtuals, key)
		delete(k.busy, key)
		maps.DeleteFunc(k.counted, func(c counterKey, _ uint32) bool { return c.server == key })
		return nil
	})
}

func (k *fakeKernel) PutReal(key serverKey, real netip.AddrPort, weight int, how ForwardingMethod, isNew bool) error {
	return k.call(func() error {
		v := k.virtuals[key]
		if v == nil {
			return errGone
		}
		if _, there := v.reals[real]; !there && !isNew {
			return errGone
		}
		k.write("put real", key, real, weight)
		v.reals[real], v.forward = weight, how
		return nil
	})
}

func (k *fakeKernel) DeleteReal(key serverKey, real netip.AddrPort) error {
	return k.call(func() error {
		v := k.virtuals[key]
		if v == nil {
			return nil
		}
		if _, there := v.reals[real]; !there {
			return nil
		}
		k.write("delete real", key, real, 0)
		delete(v.reals, real)
		delete(k.busy[key], real)
		if !k.kept[counterKey{key, real}] {
			delete(k.counted, counterKey{key, real})
		}
		return nil
	})
}

// connect begins a connection, if the real server takes new ones.
func (k *fakeKernel) connect(key serverKey, real netip.AddrPort) {
	v := k.virtuals[key]
	if v == nil || v.reals[real] == 0 {
		return
	}
	if k.busy[key] == nil {
		k.busy[key] = map[netip.AddrPort]int{}
	}
	k.busy[key][real]++
	k.counted[counterKey{key, real}]++
}

// hangUp ends all connections to a real server.
func (k *fakeKernel) hangUp(key serverKey, real netip.AddrPort) { delete(k.busy[key], real) }

func tcpKey(addrPort string) serverKey {
	return keyOf(desired.TCP, netip.MustParseAddrPort(addrPort))
}

func udpKey(addrPort string) serverKey {
	return keyOf(desired.UDP, netip.MustParseAddrPort(addrPort))
}
