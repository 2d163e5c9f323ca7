package netlinkx

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Routing returns the handle for single changes. Lists must be repeated if they are interrupted: see LinkList.
func (s *Socket) Routing() *netlink.Handle { return s.routing }

// LinkList lists all links.
func LinkList(s *Socket) (links []netlink.Link, err error) {
	err = Retry(func() error {
		links, err = s.routing.LinkList() //nolint:forbidigo // retried here
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

// FilterList lists the filters of a link at a parent.
func FilterList(s *Socket, link netlink.Link, parent uint32) (filters []netlink.Filter, err error) {
	err = Retry(func() error {
		filters, err = s.routing.FilterList(link, parent)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	return filters, nil
}
