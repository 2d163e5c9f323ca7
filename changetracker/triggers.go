package changetracker

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// maxTriggers bounds the triggers of one Service that are stored while no Apply succeeds.
const maxTriggers = 256

// trigger is the time at which the control plane saw the cause of a change of a slice.
type trigger struct {
	slice sliceName
	at    time.Time
	// sequence numbers the triggers, to separate those that a State includes from later ones.
	sequence uint64
}

// triggerTimes holds the triggers that no successful Apply has reported, in order of arrival
// (EPS-52, W-11).
type triggerTimes map[types.NamespacedName][]trigger

func (t triggerTimes) add(service types.NamespacedName, added trigger) {
	if len(t[service]) < maxTriggers {
		t[service] = append(t[service], added)
	}
}

// dropSlice drops the triggers of a removed slice only (W-10).
func (t triggerTimes) dropSlice(service types.NamespacedName, slice sliceName) {
	t.drop(service, func(tr trigger) bool { return tr.slice == slice })
}

// consume drops the triggers up to a sequence number.
func (t triggerTimes) consume(service types.NamespacedName, upTo uint64) {
	t.drop(service, func(tr trigger) bool { return tr.sequence <= upTo })
}

func (t triggerTimes) drop(service types.NamespacedName, drop func(trigger) bool) {
	list, ok := t[service]
	if !ok {
		return
	}
	if list = slices.DeleteFunc(list, drop); len(list) == 0 {
		delete(t, service)
		return
	}
	t[service] = list
}

// times returns the distinct times of a Service up to a sequence number, in order of arrival.
func (t triggerTimes) times(service types.NamespacedName, upTo uint64) []time.Time {
	var times []time.Time
	for _, tr := range t[service] {
		if tr.sequence <= upTo && !slices.ContainsFunc(times, tr.at.Equal) {
			times = append(times, tr.at)
		}
	}
	return times
}
