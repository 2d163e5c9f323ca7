package metrics

import (
	"time"

	"github.com/serviceplane/serviceplane/changetracker"
	"github.com/serviceplane/serviceplane/proxier"
)

// ofStatus has what the Status says, which a scrape reads once.
func (s *scraped) ofStatus() {
	parts := []func(*proxier.Status, sink){s.ofChanges(), s.ofFamilies(), s.ofDescriptors(), s.ofFaults()}
	s.read(func(from *Sources, out sink) {
		if from.Status == nil {
			return
		}
		status := from.Status()
		for _, send := range parts {
			send(&status, out)
		}
	})
}

// ofChanges has the changes of API objects.
func (s *scraped) ofChanges() func(*proxier.Status, sink) {
	endpointsPending := s.gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Changes of EndpointSlices that are not programmed yet.")
	endpoints := s.counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Changes of EndpointSlices received.")
	servicesPending := s.gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Services with changes that are not programmed yet.")
	services := s.counter("kubeproxy_sync_proxy_rules_service_changes_total", "Changes of Services received.")
	return func(status *proxier.Status, out sink) {
		endpointsPending(out, float64(status.Tracked.PendingEndpointSlices))
		endpoints(out, float64(status.Tracked.EndpointSlices))
		servicesPending(out, float64(status.Tracked.PendingServices))
		services(out, float64(status.Tracked.Services))
	}
}

// ofFamilies has what each IP family has programmed.
func (s *scraped) ofFamilies() func(*proxier.Status, sink) {
	queued := s.gauge("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "Time of the last request for a sync.", labelFamily)
	pending := s.gauge("serviceplane_pending_seconds", "Age of the oldest change that is not programmed yet; 0 if there is none.", labelFamily)
	ports := s.gauge("serviceplane_service_ports", "Programmed service ports.", labelFamily)
	failed := s.gauge("serviceplane_service_ports_failed", "Service ports that the last sync could not program completely.", labelFamily)
	damages := s.counter("serviceplane_damages_total", "Detected changes of the proxy's kernel objects by other programs.", labelFamily)
	ending := s.gauge("serviceplane_connections_ending", "TCP connections to endpoints that are gone, whose clients have not received a RST yet.", labelFamily)
	ended := s.counter("serviceplane_connections_ended_total", "TCP connections to endpoints that are gone, whose clients have received a RST.", labelFamily)
	return func(status *proxier.Status, out sink) {
		now := time.Now()
		for name, f := range status.Families {
			family, waiting := string(name), 0.0
			if !f.PendingSince.IsZero() {
				waiting = now.Sub(f.PendingSince).Seconds()
			}
			queued(out, seconds(status.LastQueued), family)
			pending(out, waiting, family)
			ports(out, float64(f.ServicePorts), family)
			failed(out, float64(len(f.Failed)), family)
			damages(out, float64(f.Damaged), family)
			ending(out, float64(f.ConnectionsEnding), family)
			ended(out, float64(f.ConnectionsEnded), family)
		}
	}
}

// ofDescriptors has the descriptors of clients, where there is a limit.
func (s *scraped) ofDescriptors() func(*proxier.Status, sink) {
	used := s.gauge("serviceplane_client_descriptors", "Descriptors of this process that clients hold. IP families may share them.", labelFamily)
	limit := s.gauge("serviceplane_client_descriptors_limit", "Descriptors that clients may hold.", labelFamily)
	losses := s.counter("serviceplane_client_descriptors_short_total", "Clients refused for lack of descriptors, or ended to give their descriptors to others.", "what", labelFamily)
	return func(status *proxier.Status, out sink) {
		for name, f := range status.Families {
			if d, family := f.Descriptors, string(name); d.Limit > 0 {
				used(out, float64(d.Used), family)
				limit(out, float64(d.Limit), family)
				losses(out, float64(d.Refused), "refused", family)
				losses(out, float64(d.Ended), "ended", family)
			}
		}
	}
}

// ofFaults has what is set aside, what needs an operator, and what the program lacks. Each reason has its
// number. Two Services may have the same condition, which counts once.
func (s *scraped) ofFaults() func(*proxier.Status, sink) {
	setAside := s.gauge("serviceplane_values_set_aside", "Values of API objects that are ignored because they are invalid or not supported, by reason.", "reason")
	condition := s.gauge("serviceplane_condition", "1 while the condition holds; a condition needs an operator's attention.", "type", labelFamily)
	without := s.gauge("serviceplane_dependency_missing", "1 for each dependency that the program does not give the proxy, although packets may need it.", "dependency")
	return func(status *proxier.Status, out sink) {
		problems := map[changetracker.Reason]int{}
		for i := range status.Problems {
			problems[status.Problems[i].Reason]++
		}
		for _, reason := range changetracker.Reasons() {
			setAside(out, float64(problems[reason]), string(reason))
		}
		sent := map[[2]string]bool{}
		for _, c := range status.Conditions {
			kind := [2]string{c.Type, string(c.Family)}
			if !sent[kind] {
				condition(out, 1, kind[:]...)
			}
			sent[kind] = true
		}
		for _, dependency := range status.Without {
			without(out, 1, dependency)
		}
	}
}

// ofPackets has the requests to the API server, and the kernel's counts of packets.
func (s *scraped) ofPackets() {
	reachable := s.gauge("serviceplane_apiserver_reachable", "1 if the API server answered the last request, 0 if not.")
	unreached := s.counter("serviceplane_apiserver_failures_total", "Requests that the API server did not answer, or answered with 401, 429 or 5xx.")
	localhost := s.counter("kubeproxy_iptables_localhost_nodeports_accepted_packets_total", "Connections accepted at node ports of loopback addresses.")
	invalid := s.counter("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", "Packets dropped because connection tracking has no valid state for them.")
	counted := func(out sink, send metric, read func() (packets uint64, ok bool)) {
		if read == nil {
			return
		}
		if packets, ok := read(); ok {
			send(out, float64(packets))
		}
	}
	s.read(func(from *Sources, out sink) {
		if from.APIServer != nil {
			is, failures := from.APIServer()
			reachable(out, oneIf(is))
			unreached(out, float64(failures))
		}
		counted(out, localhost, from.LocalhostNodePorts)
		counted(out, invalid, from.Invalid)
	})
}
