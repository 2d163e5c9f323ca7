package changetracker

import (
	"slices"
	"testing"
)

func (t *Tracker) isReady() bool {
	select {
	case <-t.Ready():
		return true
	default:
		return false
	}
}

// Ready waits for all Inputs, in any order and however often they are reported.
func TestReadyWaitsForAllInputs(t *testing.T) {
	say := map[Input]func(*Tracker){
		InputServices:       func(tr *Tracker) { tr.Synced(InputServices) },
		InputEndpointSlices: func(tr *Tracker) { tr.Synced(InputEndpointSlices) },
		InputNode:           func(tr *Tracker) { tr.SetNode(Node{}) }, // also one of which nothing is known
	}
	for _, awaitsNode := range []bool{false, true} {
		for _, order := range [][]Input{
			{InputServices, InputEndpointSlices, InputNode},
			{InputNode, InputEndpointSlices, InputServices},
			{InputServices, InputServices, InputNode, InputEndpointSlices, InputServices},
		} {
			tracker, err := New(Options{ObjectOptions: ObjectOptions{AwaitNode: awaitsNode}})
			if err != nil {
				t.Fatal(err)
			}
			left := []Input{InputEndpointSlices, InputServices}
			if awaitsNode {
				left = []Input{InputEndpointSlices, InputNode, InputServices}
			}
			for _, input := range order {
				if got := tracker.Waiting(); !slices.Equal(got, left) || tracker.isReady() != (len(left) == 0) {
					t.Errorf("%v: waiting for %v, ready %t, want %v", order, got, tracker.isReady(), left)
				}
				say[input](tracker)
				left = slices.DeleteFunc(left, func(i Input) bool { return i == input })
			}
			if !tracker.isReady() || len(tracker.Waiting()) > 0 {
				t.Errorf("%v: waiting for %v at last, want nothing", order, tracker.Waiting())
			}
		}
	}
}

// Changed reports several changes once, and nothing if nothing changes.
func TestChangedTellsOfChanges(t *testing.T) {
	tracker := mustTracker(t)
	told := func(what string, want bool) {
		t.Helper()
		got := false
		select {
		case <-tracker.Changed():
			got = true
		default:
		}
		if got != want {
			t.Errorf("%s: told %t, want %t", what, got, want)
		}
		for _, family := range bothFamilies() {
			applyAll(t, tracker, family)
		}
	}
	told("nothing yet", false)
	tracker.Services.Update(nil, webService())
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
	told("a Service and its slice", true)
	told("the same", false)
	tracker.Endpoints.EndpointSliceUpdate(webSlice("a", at("10.0.0.1")), false)
	told("the slice again", false)
	tracker.SetNode(Node{Name: "here"})
	told("the node", true)
	tracker.SetNode(Node{Name: "here"})
	told("the node again", false)
	tracker.Services.Delete(web)
	told("a deletion", true)
}
