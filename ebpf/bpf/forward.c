// SPDX-License-Identifier: MIT OR GPL-2.0-only

// A program at ingress of devices that forwards packets of flows which the kernel's connection
// tracking has decided: it translates their addresses as the rules would, and sends them to the next
// device, past the rules. The file is compiled for each IP family.
//
// The program decides nothing and never drops. What it does not know for sure is left to the stack:
// it passes the packet to whoever comes next, unchanged.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/types.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#ifdef IPV6
#define WORDS 4 /* of an address */
#define AF 10
#define PROTOCOL ETH_P_IPV6
#define IP_LEN sizeof(struct ipv6hdr)
#else
#define WORDS 1
#define AF 2
#define PROTOCOL ETH_P_IP
#define IP_LEN sizeof(struct iphdr)
#endif

#define L4_OFF (ETH_HLEN + IP_LEN)
#define PORTS_LEN 4 /* of a transport header */

/* The next program sees the packet, or the stack does: TC_ACT_OK would hide it from other programs. */
#define PASS (-1)

/* linux/netfilter/nf_conntrack_common.h and nf_conntrack_tcp.h; own names, since those are enums. */
#define SEEN_REPLY (1 << 1)
#define ASSURED (1 << 2)
#define CONFIRMED (1 << 3)
#define DST_NAT (1 << 5)
#define SEQ_ADJUST (1 << 6)
#define DYING (1 << 9)
#define NAT_CLASH (1 << 12)
#define HELPER (1 << 13)
#define OFFLOAD (1 << 14)
#define TCP_ESTABLISHED 3

#define WANTED (SEEN_REPLY | ASSURED | CONFIRMED | DST_NAT)
#define UNWANTED (SEQ_ADJUST | DYING | NAT_CLASH | HELPER | OFFLOAD)

/* The parts of the kernel's structures that the program reads; their places are found when it is
 * loaded. */
union nf_inet_addr {
	__u32 all[4];
} __attribute__((preserve_access_index));

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union {
		__be16 all;
	} u;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
	} dst;
} __attribute__((preserve_access_index));

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
} __attribute__((preserve_access_index));

struct ip_ct_tcp {
	__u8 state;
} __attribute__((preserve_access_index));

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __attribute__((preserve_access_index));

struct nf_conn {
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
	union nf_conntrack_proto proto;
} __attribute__((preserve_access_index));

/* Its first 12 bytes, which every kernel accepts. */
struct bpf_ct_opts___first {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple_size,
				  struct bpf_ct_opts___first *opts, __u32 opts_size) __ksym;
int bpf_ct_change_timeout(struct nf_conn *ct, __u32 milliseconds) __ksym;
void bpf_ct_release(struct nf_conn *ct) __ksym;

/* A frontend whose flows are forwarded: a VIP and its port; or a node port, and an address and port
 * of an endpoint. */
struct flow_key {
	__be32 addr[WORDS];
	__be16 port;
	__be16 node_port; /* 0 for a VIP */
	__u8 protocol;
	__u8 pad[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct flow_key);
	__type(value, __u32);
} flows SEC(".maps");

/* One bit for each port of a frontend and of an endpoint: packets without such a port, most of
 * those that are no Service's, cost no more than this. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} ports SEC(".maps");

#define PEER 1 /* packets go to the other end of the veth at once */

/* The devices that packets may come from and go to, by index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u32);
} devices SEC(".maps");

enum {
	FORWARDED,
	TO_PEER, /* of these */
	FORWARD_COUNTS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FORWARD_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} forwarded SEC(".maps");

/* Set when the program is loaded: milliseconds, as the kernel's settings are then. No TCP if
 * connection tracking would not take back what it has not followed. */
volatile const __u32 tcp_timeout;
volatile const __u32 tcp_close_timeout;
volatile const __u32 udp_timeout;
volatile const __u8 with_tcp;

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&forwarded, &what);

	if (n)
		(*n)++;
}

static __always_inline int is_ours(__be16 port)
{
	__u32 i = bpf_ntohs(port) >> 6;
	__u64 *word = bpf_map_lookup_elem(&ports, &i);

	return word && (*word >> (bpf_ntohs(port) & 63)) & 1;
}

/* What the program knows of a packet. */
struct packet {
	struct tuple {
		__be32 source[WORDS], destination[WORDS];
		__be16 source_port, destination_port;
	} tuple; /* as bpf_skb_ct_lookup wants it */
	__u32 header; /* length of the IP and the transport header */
	__u8 protocol;
	__u8 reset;
#ifdef IPV6
	__be32 flow_info;
#else
	__u8 tos;
#endif
};

/* parse reads the headers. It returns 0 if the stack must have the packet. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct udphdr *ports_of;

	if (data + L4_OFF + sizeof(struct tcphdr) > end && skb->len >= L4_OFF + sizeof(struct tcphdr)) {
		if (bpf_skb_pull_data(skb, L4_OFF + sizeof(struct tcphdr)))
			return 0;
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (data + L4_OFF + sizeof(struct udphdr) > end)
		return 0;
#ifdef IPV6
	{
		struct ipv6hdr *ip = data + ETH_HLEN;

		/* A jumbogram has the length 0; extension headers are not TCP or UDP. */
		if (ip->version != 6 || ip->hop_limit <= 1 || !ip->payload_len ||
		    bpf_ntohs(ip->payload_len) + L4_OFF > skb->len)
			return 0;
		p->protocol = ip->nexthdr;
		p->flow_info = *(__be32 *)ip & bpf_htonl(0x0fffffff);
#pragma unroll
		for (int w = 0; w < WORDS; w++) {
			p->tuple.source[w] = ip->saddr.in6_u.u6_addr32[w];
			p->tuple.destination[w] = ip->daddr.in6_u.u6_addr32[w];
		}
	}
#else
	{
		struct iphdr *ip = data + ETH_HLEN;

		if (*(__u8 *)ip != 0x45 || ip->frag_off & bpf_htons(0x3fff) || ip->ttl <= 1 ||
		    bpf_ntohs(ip->tot_len) < IP_LEN + sizeof(struct udphdr) || bpf_ntohs(ip->tot_len) + ETH_HLEN > skb->len)
			return 0;
		p->protocol = ip->protocol;
		p->tos = ip->tos;
		p->tuple.source[0] = ip->saddr;
		p->tuple.destination[0] = ip->daddr;
	}
#endif
	ports_of = data + L4_OFF;
	p->tuple.source_port = ports_of->source;
	p->tuple.destination_port = ports_of->dest;
	p->header = IP_LEN + sizeof(struct udphdr);
	if (p->protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = data + L4_OFF;

		/* The kernel follows how connections begin and end. */
		if (!with_tcp || data + L4_OFF + sizeof(struct tcphdr) > end || tcp->syn || tcp->fin)
			return 0;
		p->header = IP_LEN + tcp->doff * 4;
		p->reset = tcp->rst;
		return 1;
	}
	p->reset = 0;
	return p->protocol == IPPROTO_UDP;
}

/* turn takes a tuple of the opposite direction. */
#define turn(t, tuple_)                                                                                                \
	do {                                                                                                           \
		_Pragma("unroll") for (int w = 0; w < WORDS; w++)                                                      \
		{                                                                                                      \
			(t)->source[w] = (tuple_).dst.u3.all[w];                                                       \
			(t)->destination[w] = (tuple_).src.u3.all[w];                                                  \
		}                                                                                                      \
		(t)->source_port = (tuple_).dst.u.all;                                                                 \
		(t)->destination_port = (tuple_).src.u.all;                                                            \
	} while (0)

/* is_asked_for is whether the flow goes to a frontend of a Service that asks for it. */
static __always_inline int is_asked_for(struct nf_conn *ct, __u8 protocol)
{
	struct flow_key key = {.protocol = protocol};
	__be16 dialled = ct->tuplehash[0].tuple.dst.u.all;

#pragma unroll
	for (int w = 0; w < WORDS; w++)
		key.addr[w] = ct->tuplehash[0].tuple.dst.u3.all[w];
	key.port = dialled;
	if (bpf_map_lookup_elem(&flows, &key))
		return 1;
	/* Any address of the node; others may translate the same port of other addresses. */
#pragma unroll
	for (int w = 0; w < WORDS; w++)
		key.addr[w] = ct->tuplehash[1].tuple.src.u3.all[w];
	key.port = ct->tuplehash[1].tuple.src.u.all;
	key.node_port = dialled;
	return bpf_map_lookup_elem(&flows, &key) != NULL;
}

/* wants is whether connection tracking has decided all about the flow. */
static __always_inline int wants(struct nf_conn *ct, __u8 protocol)
{
	unsigned long status = ct->status;

	if ((status & WANTED) != WANTED || status & UNWANTED)
		return 0;
	if (protocol == IPPROTO_TCP && ct->proto.tcp.state != TCP_ESTABLISHED)
		return 0;
	return is_asked_for(ct, protocol);
}

/* route asks where the stack would send the packet. It returns 0 if the stack must do that. */
static __always_inline int route(struct __sk_buff *skb, struct packet *p, struct tuple *t,
				 struct bpf_fib_lookup *fib, int *known)
{
	__u32 gso = skb->gso_size;
	long err;

	fib->family = AF;
	fib->l4_protocol = p->protocol;
	fib->ifindex = skb->ifindex;
	/* The longest packet on the wire: segments are cut later. */
	fib->tot_len = gso ? p->header + gso : skb->len - ETH_HLEN;
	/* The stack routes before it translates the source. */
	fib->sport = p->tuple.source_port;
	fib->dport = t->destination_port;
#ifdef IPV6
	fib->flowinfo = p->flow_info;
#pragma unroll
	for (int w = 0; w < WORDS; w++) {
		fib->ipv6_src[w] = p->tuple.source[w];
		fib->ipv6_dst[w] = t->destination[w];
	}
#else
	fib->tos = p->tos;
	fib->ipv4_src = p->tuple.source[0];
	fib->ipv4_dst = t->destination[0];
#endif
	err = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
	*known = err == BPF_FIB_LKUP_RET_SUCCESS;
	/* The kernel finds the neighbour when the packet leaves. */
	if (err != BPF_FIB_LKUP_RET_SUCCESS && err != BPF_FIB_LKUP_RET_NO_NEIGH)
		return 0;
	return fib->ifindex != skb->ifindex; /* else the stack may send a redirect */
}

/* replace adds to a checksum what changes when a word is replaced. */
static __always_inline __u64 replace(__u64 sum, __u32 from, __u32 to)
{
	return sum + (__u32)~from + to;
}

static __always_inline __u32 fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

#ifndef IPV6
static __always_inline __u16 fold16(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}
#endif

struct headers {
	struct ethhdr eth;
#ifdef IPV6
	struct ipv6hdr ip;
#else
	struct iphdr ip;
#endif
	__be16 source_port, destination_port;
} __attribute__((packed, aligned(4)));

/* write translates the packet. It returns 0 if nothing has changed. */
static __always_inline int write(struct __sk_buff *skb, struct packet *p, struct tuple *t,
				 struct bpf_fib_lookup *fib, int known)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u64 addresses = 0, lives;
	__u32 ports_change;
	struct headers h;
	__u64 flags = 0;
	__u32 check_at;

	if (data + sizeof(h) > end)
		return 0;
	_Static_assert(sizeof(h) % 4 == 0 || sizeof(h) % 4 == 2, "a half word remains");
#pragma unroll
	for (int i = 0; i < sizeof(h) / 4; i++)
		((__u32 *)&h)[i] = ((__u32 *)data)[i];
	((__u16 *)&h)[sizeof(h) / 2 - 1] = ((__u16 *)data)[sizeof(h) / 2 - 1];
	if (known) {
		__builtin_memcpy(h.eth.h_dest, fib->dmac, ETH_ALEN);
		__builtin_memcpy(h.eth.h_source, fib->smac, ETH_ALEN);
	}
#pragma unroll
	for (int w = 0; w < WORDS; w++) {
		addresses = replace(addresses, p->tuple.source[w], t->source[w]);
		addresses = replace(addresses, p->tuple.destination[w], t->destination[w]);
	}
#ifdef IPV6
	/* The word of the hop limit, in the order of the wire. */
	lives = replace(0, bpf_htons(h.ip.hop_limit), bpf_htons(h.ip.hop_limit - 1));
#pragma unroll
	for (int w = 0; w < WORDS; w++) {
		h.ip.saddr.in6_u.u6_addr32[w] = t->source[w];
		h.ip.daddr.in6_u.u6_addr32[w] = t->destination[w];
	}
	h.ip.hop_limit--;
#else
	lives = replace(addresses, bpf_htons(h.ip.ttl << 8), bpf_htons((h.ip.ttl - 1) << 8));
	h.ip.check = ~fold16(fold32(lives + (__u16)~h.ip.check));
	h.ip.saddr = t->source[0];
	h.ip.daddr = t->destination[0];
	h.ip.ttl--;
#endif
	h.source_port = t->source_port;
	h.destination_port = t->destination_port;
	if (bpf_skb_store_bytes(skb, 0, &h, sizeof(h), 0))
		return 0; /* no memory for a copy */

	/* The packet is writable now: these do not fail. They know checksums that a device completes. */
	check_at = L4_OFF + (p->protocol == IPPROTO_TCP ? __builtin_offsetof(struct tcphdr, check) : __builtin_offsetof(struct udphdr, check));
	if (p->protocol == IPPROTO_UDP)
		flags = BPF_F_MARK_MANGLED_0;
	bpf_l4_csum_replace(skb, check_at, 0, fold32(addresses), flags | BPF_F_PSEUDO_HDR);
	ports_change = fold32(replace(replace(0, p->tuple.source_port, t->source_port), p->tuple.destination_port, t->destination_port));
	bpf_l4_csum_replace(skb, check_at, 0, ports_change, flags);
#ifdef IPV6
	/* For a sum that the device has made of the whole packet: the helper takes for granted that the
	 * IP header has a checksum. */
	bpf_csum_update(skb, fold32((__u64)fold32(addresses) + fold32(lives)));
#endif
	return 1;
}

/* send gives the packet to the device. */
static __always_inline int send(struct bpf_fib_lookup *fib, int to_peer)
{
	struct bpf_redir_neigh next = {.nh_family = fib->family};

	count(FORWARDED);
	if (to_peer) {
		count(TO_PEER);
		return bpf_redirect_peer(fib->ifindex, 0);
	}
	/* A neighbour that the kernel uses is one that it confirms. */
	__builtin_memcpy(next.ipv6_nh, fib->ipv6_dst, sizeof(next.ipv6_nh));
	return bpf_redirect_neigh(fib->ifindex, &next, sizeof(next), 0);
}

SEC("tc")
int forward(struct __sk_buff *skb)
{
	struct bpf_ct_opts___first opts = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_fib_lookup fib = {};
	struct tuple t = {};
	struct packet p = {};
	struct nf_conn *ct;
	int known = 0, to_peer = 0, result = PASS;
	__u32 *device, out;

	if (skb->protocol != bpf_htons(PROTOCOL) || skb->pkt_type != PACKET_HOST || skb->vlan_present)
		return PASS;
	if (!parse(skb, &p) || (!is_ours(p.tuple.destination_port) && !is_ours(p.tuple.source_port)))
		return PASS;
	opts.l4proto = p.protocol;
	ct = bpf_skb_ct_lookup(skb, (void *)&p.tuple, sizeof(p.tuple), &opts, sizeof(opts));
	if (!ct)
		return PASS;
	if (!wants(ct, p.protocol))
		goto release;
	if (opts.dir)
		turn(&t, ct->tuplehash[0].tuple);
	else
		turn(&t, ct->tuplehash[1].tuple);
	if (!route(skb, &p, &t, &fib, &known))
		goto release;
	out = fib.ifindex;
	device = bpf_map_lookup_elem(&devices, &out);
	if (!device)
		goto release;
	to_peer = known && *device & PEER;
	if (!write(skb, &p, &t, &fib, known))
		goto release;
	/* As connection tracking does it: the next packet after a reset that the other side has
	 * refused gives the flow its time again. */
	bpf_ct_change_timeout(ct, p.protocol == IPPROTO_UDP ? udp_timeout : p.reset ? tcp_close_timeout : tcp_timeout);
	result = send(&fib, to_peer);
release:
	bpf_ct_release(ct);
	return result;
}

char licenses[] SEC("license") = "Dual MIT/GPL";
