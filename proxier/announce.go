package proxier

import (
	"context"
	"errors"
	"fmt"
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
}

// Announcer advertises the VIPs that this node serves, by BGP, ARP, NDP or routes. A VIP is
// served as long as one of its Announcements is. Calls for both IP families may overlap.
// After an error the same announcements are passed again by the next sync, which follows
// soon, unless they have changed. As nobody knows what the failed call has done, Announce may
// then get a Key that is announced already, and Withdraw one that is not. Syncs wait for the Announcer, so the context ends after a few seconds.
type Announcer interface {
	// Withdraw is called before the frontends are removed from the data plane, and before
	// Cleanup.
	Withdraw(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
	// Announce is called after the frontends are programmed. If a Key is announced already,
	// its Kind or Name has changed.
	Announce(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
}

// announceTimeout bounds each call of an Announcer.
const announceTimeout = 3 * time.Second

// announcements tracks what is programmed and what is announced in one family. It is owned
// by the goroutine that syncs the family.
type announcements struct {
	announcer  Announcer // nil: none
	family     v1.IPFamily
	programmed map[changetracker.ServicePortName][]Announcement // sorted by Key
	announced  map[desired.Key]sent
	// changed holds the keys whose programmed and announced state may differ, with what is
	// programmed; the zero Announcement means nothing.
	changed map[desired.Key]Announcement
	// next is what the current Update wants.
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
		announcer: a, family: family, programmed: map[changetracker.ServicePortName][]Announcement{},
		announced: map[desired.Key]sent{}, changed: map[desired.Key]Announcement{},
	}
}

// withdrawRemoved withdraws the frontends that an Update removes. If that fails, the Update
// continues, so that the Announcer cannot delay it, and announceProgrammed tries again.
func (b *announcements) withdrawRemoved(ctx context.Context, state *changetracker.State, u *desired.Update) {
	if b.announcer == nil {
		return
	}
	b.next = make(map[changetracker.ServicePortName][]Announcement, len(u.Changes))
	for s := range u.Services() {
		b.next[s.Name] = announcementsOf(state, s)
	}
	var gone []Announcement
	for name := range b.touched(u) {
		for _, a := range b.programmed[name] {
			if find(b.next[name], a.Key) == nil {
				gone = append(gone, a)
			}
		}
	}
	for key, now := range b.changed {
		if now == (Announcement{}) { // an earlier withdrawal failed
			gone = append(gone, Announcement{Key: key})
		}
	}
	_ = b.withdraw(ctx, gone)
}

// touched returns the service ports whose announcements an Update may change.
func (b *announcements) touched(u *desired.Update) map[changetracker.ServicePortName]bool {
	names := map[changetracker.ServicePortName]bool{}
	for i := range u.Changes {
		names[u.Changes[i].Name] = true
	}
	if u.Full {
		for name := range b.programmed {
			names[name] = true
		}
	}
	return names
}

func announcementsOf(state *changetracker.State, s *desired.Service) (list []Announcement) {
	view, isReadyHere := state.For(state.Node()), false
	state.EachEndpoint(s.Name, func(e *changetracker.Endpoint) { isReadyHere = isReadyHere || e.Ready && view.Local(e) })
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Action == desired.Forward && f.VIP.IsValid() && (f.Scope != desired.ScopeLocal || isReadyHere) {
			list = append(list, Announcement{Key: s.Key(f), Kind: f.Kind, Name: s.Name})
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
// that failed keeps the frontends that it had and still wants, or none if it is Partial.
func (b *announcements) announceProgrammed(ctx context.Context, u *desired.Update, failed []*ServiceError) error {
	if b.announcer == nil {
		return nil
	}
	names := b.touched(u)
	if len(failed) > 0 {
		owners := b.owners()
		for _, e := range failed {
			names[e.Name] = true
			b.next[e.Name] = b.kept(e, owners)
		}
	}
	for name := range names { // a key may move to another service port: remove before adding
		for _, a := range b.programmed[name] {
			b.changed[a.Key] = Announcement{}
		}
	}
	for name := range names {
		for _, a := range b.next[name] {
			b.changed[a.Key] = a
		}
		if b.programmed[name] = b.next[name]; len(b.next[name]) == 0 {
			delete(b.programmed, name)
		}
	}
	b.next = nil
	return b.flush(ctx)
}

// kept returns the announcements that a failed service port keeps. A frontend that another
// service port gets with this Update is not kept.
func (b *announcements) kept(e *ServiceError, owners map[desired.Key]changetracker.ServicePortName) (kept []Announcement) {
	wanted, inUpdate := b.next[e.Name]
	for _, a := range b.programmed[e.Name] {
		owner, isOwned := owners[a.Key]
		if e.Partial || inUpdate && find(wanted, a.Key) == nil || isOwned && owner != e.Name {
			continue
		}
		kept = append(kept, a)
	}
	return kept
}

// owners maps the keys of the current Update to their service ports.
func (b *announcements) owners() map[desired.Key]changetracker.ServicePortName {
	owners := map[desired.Key]changetracker.ServicePortName{}
	for name, list := range b.next {
		for _, a := range list {
			owners[a.Key] = name
		}
	}
	return owners
}

// flush withdraws and announces what has changed.
func (b *announcements) flush(ctx context.Context) error {
	var gone, added []Announcement
	for key, now := range b.changed {
		was, isAnnounced := b.announced[key]
		switch {
		case was == sent{Announcement: now} || now == (Announcement{}) && !isAnnounced:
			delete(b.changed, key)
		case now == (Announcement{}):
			gone = append(gone, was.Announcement)
		default:
			added = append(added, now)
		}
	}
	err := b.withdraw(ctx, gone)
	if err == nil {
		for _, a := range gone {
			delete(b.changed, a.Key)
		}
	}
	return errors.Join(err, b.announce(ctx, added))
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
	for name := range b.programmed {
		delete(b.programmed, name)
	}
	for key := range b.announced {
		b.changed[key] = Announcement{}
	}
	return b.flush(ctx)
}
