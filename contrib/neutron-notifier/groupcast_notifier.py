#!/usr/bin/env python3
"""Has groupcast read Neutron as soon as something changes there.

Listens to the notifications that Neutron's API sends over oslo.messaging and calls ``POST /v1/sources/ID/poll?full=false``, which
asks Neutron for what is new. A notification says only that something changed; what groupcast believes is what Neutron's API says. So a
notification that is lost, late, doubled or forged changes nothing: the next poll of the source finds what it told, seconds later.
"""

import argparse
import logging
import pathlib
import random
import ssl
import threading
import time
import urllib.error
import urllib.request

import oslo_messaging
from oslo_config import cfg

LOG = logging.getLogger("groupcast-notifier")

# What a source of kind neutron reads. Neutron says `.start` before and `.end` after it is written.
EVENTS = r"^(port|security_group|security_group_rule|address_group)\..*\.end$"
# Many notifications that come together are one poll.
SETTLE_SECONDS = 0.02
CALL_SECONDS = 130.0
# Pause after a call that failed; it doubles up to the maximum. The source's own polls go on meanwhile.
PAUSE_SECONDS = 0.5
PAUSE_SECONDS_MAX = 30.0
ERROR_BYTES_SHOWN = 300


class Poller:
    """Asks a gateway to have the source read; of those that are named, the one that answered last."""

    def __init__(self, gateways, source, token_file, ca_file=None):
        self._gateways = [url.rstrip("/") for url in gateways]
        self._path = f"/v1/sources/{source}/poll?full=false"
        self._token_file = pathlib.Path(token_file)
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self.polls = 0

    def start(self):
        # Something may have changed before anybody listened.
        self._wanted.set()
        self._thread.start()

    def poke(self):
        self._wanted.set()

    def stop(self):
        self._ended.set()
        self._wanted.set()
        self._thread.join()

    def _run(self):
        pause = PAUSE_SECONDS
        while True:
            self._wanted.wait()
            if self._ended.wait(SETTLE_SECONDS):
                return
            # What comes from now on is another poll's.
            self._wanted.clear()
            try:
                self._poll()
                self.polls += 1
                pause = PAUSE_SECONDS
            except OSError as error:
                LOG.warning("%s: %s; trying again in about %.0f s", self._gateways[0], error, pause)
                self._gateways.append(self._gateways.pop(0))
                self._wanted.set()
                if self._ended.wait(pause * random.uniform(0.5, 1.0)):
                    return
                pause = min(pause * 2, PAUSE_SECONDS_MAX)

    def _poll(self):
        # Read each time, so that it can be changed while this runs.
        token = self._token_file.read_text(encoding="utf-8").strip()
        call = urllib.request.Request(self._gateways[0] + self._path, method="POST", data=b"")
        call.add_header("Authorization", f"Bearer {token}")
        began = time.monotonic()
        try:
            with urllib.request.urlopen(call, timeout=CALL_SECONDS, context=self._tls if call.type == "https" else None):
                LOG.info("read in %.0f ms", (time.monotonic() - began) * 1000)
        except urllib.error.HTTPError as error:
            words = error.read(ERROR_BYTES_SHOWN).decode("utf-8", "replace")
            raise OSError(f"{error.code} {words}") from error


class Endpoint:
    """What oslo.messaging calls; the name of the method is the priority of the notification."""

    filter_rule = oslo_messaging.NotificationFilter(event_type=EVENTS)

    def __init__(self, poller):
        self._poller = poller

    def info(self, _context, _publisher, event_type, _payload, _metadata):
        LOG.debug("%s", event_type)
        self._poller.poke()
        return oslo_messaging.NotificationResult.HANDLED


def listener(transport, poller, topics, exchange, pool):
    """With a queue of its own (a pool), so that it takes nothing away from others who listen."""
    targets = [oslo_messaging.Target(topic=topic, exchange=exchange) for topic in topics]
    return oslo_messaging.get_notification_listener(transport, targets, [Endpoint(poller)], executor="threading", pool=pool)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport-url", required=True, help="Neutron's: rabbit://USER:PASSWORD@HOST:5672/")
    parser.add_argument("--gateway", action="append", required=True, help="https://HOST:PORT; may be given several times")
    parser.add_argument("--source", required=True, help="the id of the [[source]]")
    parser.add_argument("--token-file", required=True, help="a file with a token of role editor")
    parser.add_argument("--ca-file", help="authorities of the gateway, in PEM; those of the system if not given")
    parser.add_argument("--topic", action="append", help="as in Neutron's [oslo_messaging_notifications] (notifications)")
    parser.add_argument("--exchange", default="neutron", help="Neutron's control_exchange (neutron)")
    parser.add_argument("--pool", default="groupcast", help="the name of the queue")
    parser.add_argument("--verbose", action="store_true", help="log every notification")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("oslo").setLevel(logging.WARNING)
    conf = cfg.ConfigOpts()
    conf([], project="groupcast-notifier")
    transport = oslo_messaging.get_notification_transport(conf, url=options.transport_url)
    poller = Poller(options.gateway, options.source, options.token_file, options.ca_file)
    server = listener(transport, poller, options.topic or ["notifications"], options.exchange, options.pool)
    server.start()
    poller.start()
    LOG.info("listening for changes of source %s", options.source)
    try:
        server.wait()
    except KeyboardInterrupt:
        server.stop()
        poller.stop()


if __name__ == "__main__":
    main()
