package proxier

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/desired"
)

// Announcement is a VIP and port that this node serves: the frontend is programmed and has
// endpoints that its traffic policy allows; with policy Local, ready ones on this node.
type Announcement struct {
	Key  desired.Key // with a valid VIP: node ports are not announced
	Kind desired.Kind
	Name changetracker.ServicePortName
	// Port is the service port, with its Ext.
	Port *changetracker.ServicePort
}

// Announcer advertises the VIPs that this node serves, by BGP, ARP, NDP or routes. A VIP is
// served as long as one of its Announcements is. Calls for both IP families may overlap.
// After an error the same announcements are passed again by the next sync, which follows
// soon, unless they have changed, and ConditionAnnouncements lasts until that succeeds. As nobody knows what the failed call has done, Announce may
// then get a Key that is announced already, and Withdraw one that is not. Syncs wait for the Announcer, so the context ends after a few seconds.
type Announcer interface {
	// Withdraw is called before the frontends are removed from the data plane, and before
	// Cleanup. If a VIP gets another frontend in the same sync, Withdraw comes after Announce has succeeded, and not at all
	// if the Key stays: a VIP that passes between Services, or from port to port, stays announced.
	Withdraw(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
	// Announce is called after the frontends are programmed. If a Key is announced already,
	// its Kind, Name or Port has changed.
	Announce(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
}

// announceTimeout bounds each call of an Announcer.
const announceTimeout = 3 * time.Second

// announcements tracks what is programmed and what is announced in one family. It is owned
// by the goroutine that syncs the family.
type announcements struct {
	announcer  Announcer // nil: none
	family     v1.IPFamily
	programmed map[desired.Key]Announcement
	announced  map[desired.Key]sent
	changed    map[desired.Key]bool // may differ between the two
	// next is what the current Update wants, sorted by Key.
	next map[changetracker.ServicePortName][]Announcement
}

// sent is an announcement that was passed to the Announcer. It is unsure if the last call with
// it failed: the Announcer may have done all, a part or nothing of it.
type sent struct {
	Announcement

	unsure bool
}

func newAnnouncements(a Announcer, family v1.IPFamily) *announcements {
	return &announcements{
		announcer: a, family: family, programmed: map[desired.Key]Announcement{},
		announced: map[desired.Key]sent{}, changed: map[desired.Key]bool{},
	}
}

// withdrawRemoved withdraws the frontends that an Update removes. If that fails, the Update continues, so that the
// Announcer cannot delay it, and announceProgrammed tries again. Those of a VIP that gets another one wait for that.
func (b *announcements) withdrawRemoved(ctx context.Context, u *desired.Update) {
	if b.announcer == nil {
		return
	}
	b.next = make(map[changetracker.ServicePortName][]Announcement, len(u.Changes))
	stays, loses, gains := map[desired.Key]bool{}, map[desired.Key]bool{}, map[netip.Addr]bool{}
	wanted := func(key desired.Key) {
		stays[key] = true
		if was, isAnnounced := b.announced[key]; !isAnnounced || was.unsure {
			gains[key.VIP] = true
		}
	}
	var gone []Announcement
	for i := range u.Changes {
		c := &u.Changes[i]
		if c.After != nil {
			b.next[c.Name] = announcementsOf(u.Now.View(), c.After)
		}
		for _, a := range b.next[c.Name] {
			wanted(a.Key)
		}
		for _, a := range b.of(c.Before) {
			gone, loses[a.Key] = append(gone, a), true
		}
	}
	for key := range b.changed { // what an earlier sync could not announce or withdraw
		if _, isProgrammed := b.programmed[key]; !isProgrammed {
			gone = append(gone, Announcement{Key: key})
		} else if !loses[key] {
			wanted(key)
		}
	}
	_ = b.withdraw(ctx, slices.DeleteFunc(gone, func(a Announcement) bool { return stays[a.Key] || gains[a.Key.VIP] }))
}

// of returns what is programmed of a service port.
func (b *announcements) of(s *desired.Service) (list []Announcement) {
	if s == nil {
		return nil
	}
	for i := range s.Frontends {
		if a, ok := b.programmed[s.Key(&s.Frontends[i])]; ok && a.Name == s.Name {
			list = append(list, a)
		}
	}
	return list
}

func announcementsOf(view changetracker.View, s *desired.Service) (list []Announcement) {
	isReadyHere := false
	choice, _ := view.Choose(s.Name, nil)
	view.State().EachEndpoint(s.Name, func(e *changetracker.Endpoint) { isReadyHere = isReadyHere || e.Ready && choice.Local(e) })
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Action == desired.Forward && f.VIP.IsValid() && (f.Scope != desired.ScopeLocal || isReadyHere) {
			list = append(list, Announcement{Key: s.Key(f), Kind: f.Kind, Name: s.Name, Port: s.Port})
		}
	}
	return list
}

func find(list []Announcement, key desired.Key) *Announcement {
	i, ok := slices.BinarySearchFunc(list, key, func(a Announcement, key desired.Key) int { return a.Key.Compare(key) })
	if !ok {
		return nil
	}
	return &list[i]
}

// announceProgrammed announces the frontends that an Update has programmed. A service port
// that failed keeps the frontends that it has and still wants, or none if it is Partial.
func (b *announcements) announceProgrammed(ctx context.Context, o *outcome) error {
	if b.announcer == nil {
		return nil
	}
	var now []Announcement
	for i := range o.outcomes { // a key may move to another service port: remove before adding
		port := &o.outcomes[i]
		was, next := b.of(port.Was), b.next[port.Name]
		for _, a := range was {
			delete(b.programmed, a.Key)
			b.changed[a.Key] = true
		}
		if !port.Failed {
			now = append(now, next...)
		} else if !o.errs[port.Name].Partial {
			now = append(now, slices.DeleteFunc(was, func(a Announcement) bool { return !has(port.Is, a.Key) || find(next, a.Key) == nil })...)
		}
	}
	for _, a := range now {
		b.programmed[a.Key] = a
		b.changed[a.Key] = true
	}
	b.next = nil
	return b.flush(ctx)
}

// has reports whether a service port, which may be nil, has a frontend.
func has(s *desired.Service, key desired.Key) bool {
	return s != nil && slices.ContainsFunc(s.Frontends, func(f desired.Frontend) bool { return s.Key(&f) == key })
}

// flush announces and withdraws what has changed, in this order: a VIP stays announced by another frontend. If that cannot be
// announced, the old one stays until it can.
func (b *announcements) flush(ctx context.Context) error {
	var gone, added []Announcement
	for key := range b.changed {
		now, wanted := b.programmed[key]
		was, isAnnounced := b.announced[key]
		switch {
		case wanted && was != sent{Announcement: now}:
			added = append(added, now)
		case !wanted && isAnnounced:
			gone = append(gone, was.Announcement)
		default:
			delete(b.changed, key)
		}
	}
	errAnnounce := b.announce(ctx, added)
	if errAnnounce != nil {
		waits := map[netip.Addr]bool{}
		for _, a := range added {
			waits[a.Key.VIP] = true
		}
		gone = slices.DeleteFunc(gone, func(a Announcement) bool { return waits[a.Key.VIP] })
	}
	errWithdraw := b.withdraw(ctx, gone)
	if errWithdraw == nil {
		for _, a := range gone {
			delete(b.changed, a.Key)
		}
	}
	return errors.Join(errAnnounce, errWithdraw)
}

func (b *announcements) withdraw(ctx context.Context, list []Announcement) error {
	known := list[:0]
	for _, a := range list {
		if was, ok := b.announced[a.Key]; ok {
			known = append(known, was.Announcement)
		}
	}
	return b.send(ctx, "withdraw", b.announcer.Withdraw, known, func(a Announcement) { delete(b.announced, a.Key) })
}

func (b *announcements) announce(ctx context.Context, list []Announcement) error {
	return b.send(ctx, "announce", b.announcer.Announce, list, func(a Announcement) {
		b.announced[a.Key] = sent{Announcement: a}
		delete(b.changed, a.Key)
	})
}

// send passes announcements to the Announcer, and calls done for each if it accepts them.
// Otherwise it is unsure about each.
func (b *announcements) send(ctx context.Context, verb string, call func(context.Context, v1.IPFamily, []Announcement) error,
	list []Announcement, done func(Announcement),
) error {
	if len(list) == 0 {
		return nil
	}
	slices.SortFunc(list, func(a, b Announcement) int { return a.Key.Compare(b.Key) })
	ctx, stop := context.WithTimeout(ctx, announceTimeout)
	defer stop()
	if err := call(ctx, b.family, slices.Clone(list)); err != nil {
		for _, a := range list {
			b.announced[a.Key] = sent{a, true}
		}
		return fmt.Errorf("%s %d VIPs and ports, %v first: %w", verb, len(list), list[0].Key, err)
	}
	for _, a := range list {
		done(a)
	}
	return nil
}

// withdrawAll withdraws all announcements before a cleanup.
func (b *announcements) withdrawAll(ctx context.Context) error {
	if b.announcer == nil {
		return nil
	}
	clear(b.programmed)
	for key := range b.announced {
		b.changed[key] = true
	}
	return b.flush(ctx)
}
