package endpointhealth

import (
	"cmp"
	"slices"
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
)

// tally counts the members of a group, in both lists, and those that are ready and do not fail.
type tally struct{ members, cluster, local, healthy, healthyLocal int }

// choose returns which members to eject: members with a target that fails, of these the ejected
// ones first, then the ones that have failed for longest, as far as the quotas of both lists of their
// group allow. A group has no quota while another one can serve instead,
// but the last local endpoint stays while the group serves on with endpoints of other nodes.
func (s *servicePort) choose() map[*member]bool {
	left, healthy := map[uint8]*tally{}, 0
	var failing []*member
	for _, m := range s.members {
		if left[m.group] == nil {
			left[m.group] = &tally{}
		}
		g, ok := left[m.group], count(m.ready && !m.target.failing)
		g.members, g.cluster, g.local = g.members+1, g.cluster+count(m.cluster), g.local+count(m.local)
		g.healthy, g.healthyLocal = g.healthy+ok, g.healthyLocal+ok*count(m.local)
		healthy += ok
		if m.target.failing {
			failing = append(failing, m)
		}
	}
	for group, g := range left {
		if healthy == g.healthy {
			g.cluster = s.policy.quota(g.cluster)
		}
		if healthy == g.healthy || g.healthyLocal == 0 && s.port.Failover.Enough(g.healthy+s.elsewhere[group], g.members+s.elsewhere[group]) {
			g.local = s.policy.quota(g.local)
		}
	}
	slices.SortStableFunc(failing, func(a, b *member) int {
		return cmp.Or(count(b.set.Eject)-count(a.set.Eject), a.target.since.Compare(b.target.since), a.target.addr.Compare(b.target.addr))
	})
	ejected := map[*member]bool{}
	for _, m := range failing {
		g := left[m.group]
		if m.cluster && g.cluster == 0 || m.local && g.local == 0 {
			continue
		}
		g.cluster, g.local = g.cluster-count(m.cluster), g.local-count(m.local)
		ejected[m] = true
	}
	return ejected
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// decide sets the Override that each member should have, and returns when to decide again; zero
// if nothing is going to change by time alone.
func (s *servicePort) decide(now time.Time) (again time.Time) {
	ejected := s.choose()
	for _, m := range s.members {
		was := m.wanted.Eject
		m.wanted = changetracker.Override{Eject: ejected[m]}
		switch {
		case m.wanted.Eject:
			m.returned = time.Time{}
		case was && s.policy.SlowStart > 0:
			m.returned = now
		}
	}
	return s.ramp(now)
}

// ramp weights the members while some of them have returned within SlowStart.
func (s *servicePort) ramp(now time.Time) (again time.Time) {
	steps, ramping := s.policy.SlowStartSteps, false
	for _, m := range s.members {
		if m.returned.IsZero() {
			continue
		}
		passed := m.step(now, &s.policy)
		if steps < 2 || passed >= steps-1 {
			m.returned = time.Time{}
			continue
		}
		ramping = true
		last := time.Duration(steps - 1)
		next := m.returned.Add((s.policy.SlowStart*time.Duration(passed+1) + last - 1) / last) // rounded up
		if again.IsZero() || next.Before(again) {
			again = next
		}
	}
	if !ramping {
		return time.Time{}
	}
	for _, m := range s.members {
		share := steps
		if !m.returned.IsZero() {
			share = 1 + m.step(now, &s.policy)
		}
		m.wanted.Scale = uint16(share) //nolint:gosec // maxSteps bounds it
	}
	return again
}

// step is the number of steps that have passed since the return.
func (m *member) step(now time.Time, p *CheckPolicy) int {
	return int(now.Sub(m.returned) * time.Duration(p.SlowStartSteps-1) / p.SlowStart)
}
