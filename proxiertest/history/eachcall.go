package history

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestEachCall lets each call to the kernel of one change, and of the first sync of another
// process, fail in turn:
//
//   - with an error, after which the kernel has done nothing;
//   - with a lost answer, or with none;
//   - because another program changes our objects before or after it;
//   - by the death of the process before or after it.
//
// With seedsVariable each call has all faults. Otherwise about every third of the first calls has one,
// and fewer of the later ones; each run draws others.
func TestEachCall(t *testing.T, planes Planes) {
	t.Helper()
	seed, _ := seeds(t, 1)
	d := dice{rand.New(rand.NewPCG(seed, 21))}
	t.Logf("to run the same again: %s=%d go test -run '%s'", seedVariable, seed, t.Name())
	plane, fresh := planes(t, seed)
	before, change := append(d.begin(6), Event{Kind: Converge}), d.objects(6)
	for what, steps := range map[string]func(fault Event) []Event{
		"change": func(fault Event) []Event {
			return slices.Concat(before, []Event{fault}, change, []Event{{Kind: RunSync}, {Kind: Converge}})
		},
		"another process": func(fault Event) []Event {
			fault.Next = true
			return slices.Concat(before, []Event{fault}, change, []Event{{Kind: Restart}, {Kind: RunSync}, {Kind: Converge}})
		},
	} {
		n := d.eachCall(t, plane, fresh, steps)
		t.Logf("%s: %d faults", what, n)
		if n == 0 && !t.Failed() && !hasSockets(plane) { // which may need no other socket
			t.Errorf("%s: no call to the kernel could fail", what)
		}
	}
}

// eachCall returns the number of faults that happened.
func (d dice) eachCall(t *testing.T, plane, fresh Plane, steps func(fault Event) []Event) (n int) {
	t.Helper()
	for call := 0; ; call += 1 + d.IntN(few(5+call/4, 1)) {
		happened := false
		for _, fault := range d.faults() {
			fault.Call = call
			fired, err := runCounting(t.Context(), plane, fresh, steps(fault), patience)
			if err != nil {
				t.Errorf("%v: %v", fault, err)
				return n
			}
			n += fired
			happened = happened || fired > 0
		}
		if !happened {
			return n
		}
	}
}

// faults returns some of all faults of one call, or all with seedsVariable.
func (d dice) faults() []Event {
	all := []Event{{Kind: Kill}, {Kind: Kill, Late: true}, {Kind: Hang}}
	for _, e := range Errors {
		all = append(all, Event{Kind: Fail, Error: e}, Event{Kind: Lose, Error: e})
	}
	for _, late := range []bool{false, true} {
		all = append(all, Event{Kind: DamageAt, Late: late, Damage: d.IntN(1000)})
	}
	d.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:few(1, len(all))]
}
