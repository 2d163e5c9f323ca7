package canary

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// WithoutCanary returns an Announcer that passes all announcements to next, except those of
// the canary's VIPs, which are for this node alone. Nil stays nil.
func WithoutCanary(next proxier.Announcer) proxier.Announcer {
	if next == nil {
		return nil
	}
	return quiet{next}
}

type quiet struct{ next proxier.Announcer }

func (q quiet) Announce(ctx context.Context, family v1.IPFamily, announcements []proxier.Announcement) error {
	if announcements = others(announcements); len(announcements) == 0 {
		return nil
	}
	return q.next.Announce(ctx, family, announcements)
}

func (q quiet) Withdraw(ctx context.Context, family v1.IPFamily, announcements []proxier.Announcement) error {
	if announcements = others(announcements); len(announcements) == 0 {
		return nil
	}
	return q.next.Withdraw(ctx, family, announcements)
}

func others(announcements []proxier.Announcement) []proxier.Announcement {
	return slices.DeleteFunc(slices.Clone(announcements), func(a proxier.Announcement) bool { return a.Name.Namespace == Namespace })
}
