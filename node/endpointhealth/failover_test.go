package endpointhealth_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/node/endpointhealth"
	"github.com/serviceplane/serviceplane/proxiertest"
)

// hurried is a policy that finds a dead endpoint in less than 3 seconds.
var hurried = endpointhealth.CheckPolicy{
	Interval: time.Second, Timeout: 500 * time.Millisecond, Failures: 2, Successes: 2, EjectFor: 10 * time.Second, MaxEjectFor: 5 * time.Minute,
}

// grouped gives web one endpoint for each priority.
func (k *kit) grouped(priorities ...uint8) {
	k.t.Helper()
	var list []changetracker.Endpoint
	for i, priority := range priorities {
		list = append(list, changetracker.Endpoint{Addr: endpoint(i + 1), Ready: true, Serving: true, Priority: priority})
	}
	k.set(list...)
}

// serving are the numbers of the endpoints that get new connections.
func (k *kit) serving() string {
	k.t.Helper()
	selection, _ := k.Programmed(v1.IPv4Protocol).For(changetracker.Node{Name: "here"}).Select(webName())
	var numbers []int
	for i := range selection.Cluster {
		numbers = append(numbers, int(selection.Cluster[i].Addr.Addr().As4()[3]))
	}
	return fmt.Sprint(numbers)
}

// TestAGroupTakesOver: 3 seconds after the last endpoint of the first group has stopped to answer, the next group
// serves, although more than the quota is ejected. Without an endpoint that answers, the quota holds. Groups that stand
// by are checked, and the first one serves again when it answers.
func TestAGroupTakesOver(t *testing.T) {
	inBubble(t, hurried, 0, func(k *kit) {
		k.grouped(0, 0, 0, 1, 1)
		k.run()
		expect := func(after time.Duration, when, want string) {
			t.Helper()
			time.Sleep(after)
			if got := k.serving(); got != want {
				t.Errorf("%s: %s serve, want %s", when, got, want)
			}
		}
		expect(10*time.Second, "all answer", "[1 2 3]")
		k.breaks(at(1), errHangs)
		k.breaks(at(3), errSick)
		expect(4*time.Second, "one of three answers", "[2]") // two syncs, with a Pause between them
		k.breaks(at(2), errHangs)
		expect(3*time.Second, "none of the first group answers", "[4 5]")
		k.breaks(at(4), errSick)
		expect(3*time.Second, "one of the second group answers", "[5]")
		k.breaks(at(5), errSick)
		time.Sleep(3 * time.Second)
		if got := k.serving(); got == "[]" {
			t.Error("none answers, and all are ejected")
		}
		for i := range 5 {
			k.breaks(at(i+1), nil)
		}
		expect(time.Hour, "all answer again", "[1 2 3]")
		if checked := k.checks(); len(checked) != 5 {
			t.Errorf("%d endpoints are checked, want all", len(checked))
		}
	})
}

// A first group that comes and goes 1,000 times changes little: each return takes longer.
func TestAGroupThatFlapsChangesLittle(t *testing.T) {
	inBubble(t, hurried, 0, func(k *kit) {
		k.grouped(0, 1)
		k.run()
		time.Sleep(10 * time.Second)
		var served []string
		for i := range 1000 {
			k.breaks(at(1), []error{errSick, nil}[i%2])
			time.Sleep(4 * time.Second)
			served = append(served, k.serving())
		}
		if changes := len(slices.Compact(served)); changes < 3 || changes > 60 {
			t.Errorf("%d changes of the group in 1,000 flaps, want 3 to 60", changes)
		}
	})
}

// A standby group is no reason to eject the last endpoint of the node, if its own group serves on with endpoints of
// other nodes: the node would drop what the traffic policy Local sends there. If the group serves no more, it is.
func TestTheLastLocalEndpointStaysWhileItsGroupServes(t *testing.T) {
	inBubble(t, hurried, 0, func(k *kit) {
		k.service("web", proxiertest.InternalPolicyLocal(), proxiertest.LoadBalancer("203.0.113.1"))
		list := []changetracker.Endpoint{
			{Addr: endpoint(1), Node: "here", Ready: true},
			{Addr: endpoint(2), Node: "there", Ready: true},
			{Addr: endpoint(3), Node: "here", Ready: true, Priority: 1},
		}
		k.set(list...)
		k.run()
		local := func() (n int) {
			selection, _ := k.Programmed(v1.IPv4Protocol).For(changetracker.Node{Name: "here"}).Select(webName())
			return len(selection.Local)
		}
		k.breaks(at(1), errSick)
		time.Sleep(10 * time.Second)
		if got := local(); got != 1 {
			t.Errorf("%d local endpoints while the group serves elsewhere, want the last one", got)
		}
		k.breaks(at(2), errSick)
		time.Sleep(10 * time.Second)
		if got := k.serving(); got != "[3]" {
			t.Errorf("%s serve when the group fails, want the other group", got)
		}
	})
}

// A group of endpoints that terminate serves no group instead that has ready ones: the quota holds, and the Status says what
// is ejected.
func TestAGroupThatTerminatesIsNoReasonToEjectAll(t *testing.T) {
	inBubble(t, hurried, 0, func(k *kit) {
		var list []changetracker.Endpoint
		for i := range 4 {
			list = append(list, changetracker.Endpoint{Addr: endpoint(i + 1), Ready: true})
			k.breaks(at(i+1), errSick)
		}
		list = append(list, changetracker.Endpoint{Addr: endpoint(5), Priority: 1, Serving: true, Terminating: true})
		k.set(list...)
		k.run()
		time.Sleep(10 * time.Second)
		ejected := 0
		for _, e := range k.Programmed(v1.IPv4Protocol).Endpoints(webName()) {
			if e.Ejected {
				ejected++
			}
		}
		if said := k.checker.Status().Ejected; ejected != 2 || said != ejected {
			t.Errorf("%d endpoints are ejected, Status says %d, want 2", ejected, said)
		}
	})
}
