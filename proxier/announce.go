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

// Announcement is a VIP with a port that this node serves: it is programmed, and has
// endpoints that its traffic policy lets it use; with policy Local, ready ones on this
// node.
type Announcement struct {
	Key  desired.Key // its VIP is valid: node ports are not announced
	Kind desired.Kind
	Name changetracker.ServicePortName
}

// Announcer tells others which VIPs this node serves, by BGP, ARP, NDP or routes. A VIP is
// served as long as one of its Announcements is. Calls for both IP families may overlap.
// What an error is returned for is tried again with the next sync, which soon follows. The
// context ends after a few seconds, since syncs wait.
type Announcer interface {
	// Withdraw comes before the announcements are taken from the data plane, and before
	// Cleanup.
	Withdraw(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
	// Announce comes after they are programmed. One whose Key is announced already has
	// another Kind now.
	Announce(ctx context.Context, family v1.IPFamily, announcements []Announcement) error
}

// announceTimeout is how long an Announcer may keep a sync waiting, for each call.
const announceTimeout = 3 * time.Second

// announcements knows what is programmed and what is announced of one family. It is owned
// by the goroutine that syncs the family.
type announcements struct {
	announcer  Announcer // nil: none
	family     v1.IPFamily
	programmed map[changetracker.ServicePortName][]Announcement // sorted by Key
	announced  map[desired.Key]Announcement
	// changed are the keys of which both may differ, and where they are programmed.
	changed map[desired.Key]Announcement
	// next is what the Update under way wants.
	next map[changetracker.ServicePortName][]Announcement
}

func newAnnouncements(a Announcer, family v1.IPFamily) *announcements {
	return &announcements{
		announcer: a, family: family, programmed: map[changetracker.ServicePortName][]Announcement{},
		announced: map[desired.Key]Announcement{}, changed: map[desired.Key]Announcement{},
	}
}

// before withdraws what an Update takes away. If that fails, the Update goes on, and after
// tries again: what is not to be served any more must not wait for it.
func (b *announcements) before(ctx context.Context, state *changetracker.State, u *desired.Update) {
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
		if now == (Announcement{}) { // it could not be withdrawn before
			gone = append(gone, Announcement{Key: key})
		}
	}
	_ = b.withdraw(ctx, gone)
}

// touched are the service ports whose announcements an Update may change.
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
	view := state.For(state.Node())
	isReadyHere := slices.ContainsFunc(state.Endpoints(s.Name), func(e changetracker.Endpoint) bool { return e.Ready && view.Local(&e) })
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

// after announces what an Update has programmed. A service port that failed has what it
// had before, as far as it still wants it, and nothing if it is not even that.
func (b *announcements) after(ctx context.Context, u *desired.Update, failed []*ServiceError) error {
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
	for name := range names { // a key may change hands: first all that lose it
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

// kept is what a service port that failed still has: nobody else may have got it.
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

// owners are those who get the keys of the Update under way.
func (b *announcements) owners() map[desired.Key]changetracker.ServicePortName {
	owners := map[desired.Key]changetracker.ServicePortName{}
	for name, list := range b.next {
		for _, a := range list {
			owners[a.Key] = name
		}
	}
	return owners
}

// flush tells what has changed.
func (b *announcements) flush(ctx context.Context) error {
	var gone, come []Announcement
	for key, now := range b.changed {
		was, isAnnounced := b.announced[key]
		switch {
		case was == now || now == (Announcement{}) && !isAnnounced:
			delete(b.changed, key)
		case now == (Announcement{}):
			gone = append(gone, was)
		default:
			come = append(come, now)
		}
	}
	err := b.withdraw(ctx, gone)
	if err == nil {
		for _, a := range gone {
			delete(b.changed, a.Key)
		}
	}
	return errors.Join(err, b.announce(ctx, come))
}

func (b *announcements) withdraw(ctx context.Context, list []Announcement) error {
	known := list[:0]
	for _, a := range list {
		if was, ok := b.announced[a.Key]; ok {
			known = append(known, was)
		}
	}
	return b.tell(ctx, "withdraw", b.announcer.Withdraw, known, func(a Announcement) { delete(b.announced, a.Key) })
}

func (b *announcements) announce(ctx context.Context, list []Announcement) error {
	return b.tell(ctx, "announce", b.announcer.Announce, list, func(a Announcement) {
		b.announced[a.Key] = a
		delete(b.changed, a.Key)
	})
}

func (b *announcements) tell(ctx context.Context, what string, how func(context.Context, v1.IPFamily, []Announcement) error,
	list []Announcement, done func(Announcement),
) error {
	if len(list) == 0 {
		return nil
	}
	slices.SortFunc(list, func(a, b Announcement) int { return a.Key.Compare(b.Key) })
	ctx, stop := context.WithTimeout(ctx, announceTimeout)
	defer stop()
	if err := how(ctx, b.family, slices.Clone(list)); err != nil {
		return fmt.Errorf("%s %d VIPs and ports, %v and more: %w", what, len(list), list[0].Key, err)
	}
	for _, a := range list {
		done(a)
	}
	return nil
}

// withdrawAll comes before a clean-up.
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
